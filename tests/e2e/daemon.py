"""The real daemon in a test: `tiercel serve` as a child process on a free port."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

from tests.processes import activated

TIERCEL = str(Path(sys.executable).with_name("tiercel"))
_URL = re.compile(r"tiercel serves (\S+) at (http://\S+)")


class Daemon:
    """One running `tiercel serve`."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self.process = process
        self.log = log
        self.url = ""
        self.model = ""
        self.http = httpx.Client(timeout=60)

    def wait_ready(self, patience_s: float = 120.0) -> None:
        """Wait until the daemon has announced its address."""
        end_s = time.monotonic() + patience_s
        while time.monotonic() < end_s:
            found = _URL.search(self.log.read_text())
            if found:
                self.model, self.url = found.groups()
                self.http.base_url = self.url
                return
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)
        raise AssertionError(f"not ready: {self.log.read_text()}")

    def wait_said(self, start: str, patience_s: float = 120.0) -> str:
        """Wait until the daemon has announced an address that begins like this; return the address."""
        end_s = time.monotonic() + patience_s
        while (found := re.search(rf"tiercel serves \S+ at ({re.escape(start)}\S*)", self.log.read_text())) is None:
            assert time.monotonic() < end_s and self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)
        return found[1]

    def metric(self, name: str) -> float:
        """Return the sum of one metric's samples."""
        lines = [line for line in self.http.get("/metrics").text.splitlines() if re.match(rf"{name}(\{{|\s)", line)]
        assert lines, name
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def wait_metric(self, name: str, value: float, patience_s: float = 10.0) -> None:
        """Wait until a metric has a value."""
        end_s = time.monotonic() + patience_s
        while (now := self.metric(name)) != value:
            assert time.monotonic() < end_s, f"{name} is {now}, expected {value}"
            time.sleep(0.02)

    def assert_nothing_held(self) -> None:
        """Assert that no sequence runs or waits and no block is in use."""
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
            self.wait_metric(name, 0.0)

    def chat(self, content: str, **fields: object) -> httpx.Response:
        """Send one greedy chat request without streaming."""
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def engine_pid(self) -> int:
        """The process id of the engine."""
        end_s = time.monotonic() + 10
        while True:  # a child has the command line of its parent for a moment
            engines = [pid for pid in children_of(self.process.pid) if "engine --fd " in command_of(pid)]
            if engines or time.monotonic() > end_s:
                (engine,) = engines
                return engine
            time.sleep(0.002)

    def complete(self, prompt: str, **fields: object) -> httpx.Response:
        """Send one greedy completion without streaming."""
        return self.http.post("/v1/completions", json={"prompt": prompt, "temperature": 0, "max_tokens": 12, **fields})

    def kill_all(self) -> None:
        """Kill both processes at once, as a crash of the machine would."""
        for pid in (self.engine_pid(), self.process.pid):
            os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def stop(self, number: int = signal.SIGTERM, patience_s: float = 40.0) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(patience_s)


def children_of(pid: int) -> list[int]:
    """The process ids of the children that the main thread of a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_of(pid: int) -> str:
    """The command line of a process; empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


@contextlib.contextmanager
def daemon(
    folder: Path,
    *flags: str,
    wait: bool = True,
    under: tuple[str, ...] = (),
    sockets: Sequence[socket.socket] = (),
    program: Sequence[str] = (TIERCEL, "serve"),
    variables: Mapping[str, str] | None = None,
) -> Iterator[Daemon]:
    """Serve until the block ends. `sockets` are passed as systemd does it.

    `under` is the command of a tracer, `program` another one than `tiercel serve`.

    Step times are not measured at the start, unless a flag asks for it: that would take 1.5 s of each test.
    """
    log = folder / f"serve-{time.monotonic_ns()}.log"
    command = [*under, *program, "--port", "0", "--calibration-seconds", "0", *flags]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TIERCEL_", "VLLM_"))}
    environment |= variables or {}
    fds = [sock.fileno() for sock in sockets]
    if sockets:
        command = activated(command, sockets)
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, text=True, env=environment, cwd=folder, pass_fds=fds
        )
    running = Daemon(process, log)
    try:
        if wait:
            running.wait_ready()
        yield running
    finally:
        running.http.close()
        if process.poll() is None:
            process.kill()
        process.wait()
