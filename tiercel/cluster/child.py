"""A program beside a Ray actor. It ends when the actor ends, also when the actor is killed."""

import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from tiercel.system.standard_streams import output_stream, say
from tiercel.values.errors import TiercelError

# The kernel ends the program when the thread that started it ends (PR_SET_PDEATHSIG, prctl(2), kept by execve).
_BOUND = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent has died")
os.execv(sys.argv[2], sys.argv[2:])
"""

_CHUNK_BYTES = 1 << 16
_PIPE_BYTES = 1 << 20  # the most that a pipe holds
_DRAIN_S = 5.0  # to read what a program has written before its end; the log may not take it


class BoundChild:
    """A child process. One thread starts it and waits for its end, another one passes its output on."""

    def __init__(self, command: Sequence[str], announcement: str) -> None:
        """Start a program. `announcement`: a pattern of the line that says that it serves, with one group."""
        self._command = [sys.executable, "-c", _BOUND, str(os.getpid()), *command]
        self._pattern = re.compile(announcement)
        self._changed = threading.Condition()
        self._announced: str | None = None
        self._has_ended = False
        self._is_drained = threading.Event()  # what the program wrote was read
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
        """Run the program until it has ended and its output has been read. The last line may be the announcement.

        A descendant that still holds its output does not count.
        """
        source, sink = os.pipe()
        over, tell_over = os.pipe()
        try:
            self._process = subprocess.Popen(self._command, stdout=sink)  # noqa: S603 - our own program
            os.close(sink)
            self._started.set()
            threading.Thread(target=self._pass_on, args=(source, over), name="output", daemon=True).start()
            self._process.wait()
            os.close(tell_over)
            self._is_drained.wait(_DRAIN_S)
        finally:
            self._started.set()
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def _pass_on(self, source: int, over: int) -> None:
        """Write the output to the log of the actor, and look for the announcement.

        `over` is readable once the program has ended. What it wrote is in the pipe by then; what follows is of others.
        """
        waited, line, left = [source, over], b"", _PIPE_BYTES
        while True:
            ready, _, _ = select.select(waited, [], [])
            if source not in ready or left <= 0:  # the program has ended, and all that it wrote was read
                self._is_drained.set()
                waited = [source]
                left = sys.maxsize
                continue
            chunk = os.read(source, _CHUNK_BYTES)
            left -= len(chunk) if over in ready else 0
            *lines, line = (line + chunk).split(b"\n")
            if not chunk or len(line) > _CHUNK_BYTES:
                lines, line = [*lines, line], b""
            for raw in lines:
                self._tell(raw.decode(errors="replace"))
            if not chunk:
                break
        self._is_drained.set()
        os.close(source)
        os.close(over)

    def _tell(self, line: str) -> None:
        if self._announced is None and (found := self._pattern.search(line)):
            with self._changed:
                self._announced = found[1]
                self._changed.notify_all()
        if line:
            say(line, output_stream())
