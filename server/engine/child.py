"""The engine process as seen by its parent: started with one socket, and gone for certain when we are."""

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

from tiercel.openmp import engine_environment
from tiercel.server.engine.inherited import InheritedResources

_POLL_S = 0.02


def engine_command() -> tuple[str, ...]:
    """How the engine is started; `--fd N` and `--arena-fd N` are added."""
    return (sys.executable, "-m", "tiercel.engine.process")


class EngineChild:
    """A child in its own process group, so that Ctrl-C in a terminal reaches only the parent, which drains."""

    def __init__(self, process: "subprocess.Popen[bytes]", sock: socket.socket) -> None:
        self._process = process
        self.sock = sock  # our end

    @staticmethod
    def start(command: Sequence[str], inherited: InheritedResources | None = None) -> "EngineChild":
        """Start the engine on its end of a socket pair, with what outlives it. Leaving the `with` kills it.

        Errors: OSError.
        """
        kept, told = (inherited.fds, inherited.arguments) if inherited is not None else ((), ())
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            process = subprocess.Popen(  # noqa: S603 - our own command
                [*command, "--fd", str(fd), *told],
                pass_fds=[fd, *kept],
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
        """Process id, and id of its group."""
        return self._process.pid

    async def cause(self, patience_s: float) -> str:
        """Why it ended, for people, once it has."""
        await self._wait(patience_s)
        code = self._process.poll()
        if code is None:
            return "it closed its socket"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    async def leave(self, patience_s: float) -> None:
        """Wait for the exit that was asked for; then insist."""
        for step_signal in (None, signal.SIGTERM):
            if step_signal is not None:
                self._signal(step_signal)
            await self._wait(patience_s)
        self.kill()

    async def _wait(self, patience_s: float) -> None:
        for _ in range(int(patience_s / _POLL_S)):
            if self._process.poll() is not None:
                return
            await asyncio.sleep(_POLL_S)

    def kill(self) -> None:
        """End the whole group now and collect it."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        """To the group while it has a member; the child is not collected yet, so its id cannot be another's."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._process.returncode is None:
                os.killpg(self._process.pid, number)
