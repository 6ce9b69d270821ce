"""A program that a Ray actor runs beside itself and that ends with it, whatever ends the actor."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO

from tiercel.errors import TiercelError
from tiercel.standard_streams import output_stream, say

# The kernel ends the program when the thread that started it ends (PR_SET_PDEATHSIG, prctl(2), kept by execve).
_BOUND = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent has died")
os.execv(sys.argv[2], sys.argv[2:])
"""


class BoundChild:
    """A child process. One thread starts it and waits for its end, another one passes its output on."""

    def __init__(self, command: Sequence[str], announcement: str) -> None:
        """Start a program. `announcement`: a pattern of the line that says that it serves, with one group."""
        self._command = [sys.executable, "-c", _BOUND, str(os.getpid()), *command]
        self._pattern = re.compile(announcement)
        self._changed = threading.Condition()
        self._announced: str | None = None
        self._has_ended = False
        self._started = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="child", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The process id; None if it could not be started."""
        self._started.wait()
        return None if self._process is None else self._process.pid

    @property
    def announced(self) -> str | None:
        """The group of the announcement; None before it."""
        return self._announced

    @property
    def is_alive(self) -> bool:
        """Whether the program runs."""
        return not self._has_ended

    def wait_announced(self, patience_s: float) -> str:
        """Return the group of the announcement. Errors: TiercelError if the program ends first, or time is up."""
        with self._changed:
            self._changed.wait_for(lambda: self._announced is not None or self._has_ended, patience_s)
            if self._announced is None:
                reason = "ended" if self._has_ended else f"does not serve after {patience_s:g} s"
                raise TiercelError("cluster.child", f"{self._command[5]} {reason}: see the log of this actor")
            return self._announced

    def stop(self, patience_s: float) -> None:
        """Ask the program to drain and wait for its end; kill it if that takes longer than `patience_s`."""
        self._started.wait()
        if self._process is not None and self.is_alive:
            self._process.send_signal(signal.SIGTERM)
        self._thread.join(patience_s)
        if self._process is not None and self.is_alive:
            self._process.kill()
            self._thread.join()

    def _run(self) -> None:
        """Run the program until it ends. A descendant that still holds its output does not count."""
        try:
            self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE)  # noqa: S603 - our own program
            self._started.set()
            threading.Thread(target=self._pass_on, args=(self._process.stdout,), name="output", daemon=True).start()
            self._process.wait()
        finally:
            self._started.set()
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def _pass_on(self, output: IO[bytes]) -> None:
        """Write the output to the log of the actor, and look for the announcement."""
        with output:
            for raw in output:
                line = raw.decode(errors="replace")
                if self._announced is None and (found := self._pattern.search(line)):
                    with self._changed:
                        self._announced = found[1]
                        self._changed.notify_all()
                say(line.rstrip("\n"), output_stream())
