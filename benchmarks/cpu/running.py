"""Servers while they run: start, wait for the first answer, pause, stop."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from benchmarks.cpu.process_tree import pause, resume
from benchmarks.cpu.refusal import refuse
from benchmarks.cpu.servers import Server, convert

_START_S = 900.0  # vLLM compiles for minutes at its first start
_STOP_S = 60.0


class ServerFault(Exception):
    """A server that cannot read the model or does not start. The message names its log."""


class RunningServer:
    """A server process. It runs until the `with` block ends, and is paused whenever it is not measured."""

    def __init__(self, server: Server, log: Path, nice: int = 0) -> None:
        self.server = server
        self._log = log
        self._nice = nice
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Self:
        """Start and return when the server answers. Errors: ServerFault; SystemExit if the port is taken."""
        server = self.server
        if server.conversion is not None and not convert(server.conversion, self._log):
            raise ServerFault(f"{server.name} cannot read the model: see {self._log}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", server.port)) == 0:
                refuse(f"something listens on port {server.port} already; choose others with --port")
        with self._log.open("ab") as file:
            self._process = subprocess.Popen(
                server.command,
                env={**os.environ, **server.variables},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        _prefer(self._process.pid, self._nice)
        if not self._answers():
            self._stop()
            raise ServerFault(f"{server.name} did not start: see {self._log}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.resume()
        self._stop()

    def pause(self) -> None:
        """Stop all of its processes, so that they use no CPU while another server is measured."""
        pause(self.pid)

    def resume(self) -> None:
        """Continue after `pause`."""
        resume(self.pid)

    def _answers(self) -> bool:
        assert self._process is not None
        end_s = time.monotonic() + _START_S
        while time.monotonic() < end_s and self._process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(self.server.url + self.server.ready_path, trust_env=False).status_code == 200:
                    return True
            time.sleep(0.5)
        return False

    def _stop(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _prefer(pid: int, nice: int) -> None:
    """Give a process and its session another priority. Between sessions only the autogroup's value counts."""
    if not nice:
        return
    try:
        os.setpriority(os.PRIO_PROCESS, pid, nice)
        with contextlib.suppress(FileNotFoundError):  # a kernel without autogroups
            Path(f"/proc/{pid}/autogroup").write_text(str(nice), encoding="utf-8")
    except PermissionError:
        refuse(f"--nice {nice}: not allowed to this user")
