"""The engine process and its parent: started with one end of a socket pair, its parent ends it."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from tiercel.server.client.crash_book import DeathKind
from tiercel.server.client.inherited import InheritedResources
from tiercel.system.openmp import engine_environment

_POLL_S = 0.02
_EXIT_S = 0.3


def engine_command() -> tuple[str, ...]:
    """Return the command that starts the engine; `--fd N` and `--arena-fd N` are appended to it."""
    return (sys.executable, "-m", "tiercel.engine")


class EngineChild:
    """A child process in a process group of its own, so that Ctrl-C in a terminal reaches only the parent."""

    def __init__(self, process: "subprocess.Popen[bytes]", sock: socket.socket) -> None:
        self._process = process
        self.sock = sock  # the parent's end

    @staticmethod
    def start(command: Sequence[str], inherited: InheritedResources | None = None) -> "EngineChild":
        """Start the engine with its end of a socket pair and the inherited descriptors. Leaving the `with` kills it.

        Errors: OSError.
        """
        fds, arguments = (inherited.fds, inherited.arguments) if inherited is not None else ((), ())
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            process = subprocess.Popen(  # noqa: S603 - our own command
                [*command, "--fd", str(fd), *arguments],
                pass_fds=[fd, *fds],
                stdin=subprocess.DEVNULL,
                process_group=0,
                env=engine_environment(),
            )
        return EngineChild(process, ours)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sock.close()
        self.kill()

    @property
    def pid(self) -> int:
        """The process id, which is also the id of its group."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    @property
    def death_kind(self) -> DeathKind:
        """The way in which the process ended; it has been waited for."""
        code = self._process.returncode
        if code >= 0:
            return DeathKind.EXIT
        return DeathKind.KILLED if code == -signal.SIGKILL else DeathKind.SIGNAL

    async def end(self) -> None:
        """Kill the whole group, and wait until the kernel has ended the process.

        A process in an uninterruptible call, such as a read from a dead disk, is waited for as long as that takes.
        """
        if not self.has_ended:
            await self._wait(_EXIT_S)  # a process that has closed its socket is about to exit, and its code says why
        self._signal(signal.SIGKILL)
        while not self.has_ended:
            await self._wait(_EXIT_S)

    async def cause(self, patience_s: float) -> str:
        """Wait for the end of the process; return its cause in words."""
        await self._wait(patience_s)
        code = self._process.poll()
        if code is None:
            return "it closed its socket"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    async def leave(self, patience_s: float) -> None:
        """Wait for the process to exit by itself, then after SIGTERM; then kill it. Each wait is `patience_s` long."""
        await self._wait(patience_s)
        self._signal(signal.SIGTERM)
        await self._wait(patience_s)
        self.kill()

    async def _wait(self, patience_s: float) -> None:
        for _ in range(int(patience_s / _POLL_S)):
            if self._process.poll() is not None:
                return
            await asyncio.sleep(_POLL_S)

    def kill(self) -> None:
        """Kill the whole group and wait for the process."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        """Signal the group. The process has not been waited for, so that its id cannot belong to another process."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._process.returncode is None:
                os.killpg(self._process.pid, number)
