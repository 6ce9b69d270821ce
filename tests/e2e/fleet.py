"""Several engines and a front in a test, a proxy between them that can stop forwarding, and streams with times."""

import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import httpx

from tests.e2e.daemon import TIERCEL, children_of, command_of

_ADDRESS = re.compile(r"tiercel engine serves \S+ at (\S+)")


class HostProcess:
    """One running `tiercel engine`."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_ready(self, patience_s: float = 120.0) -> str:
        """Wait until the engine serves; return the address."""
        end_s = time.monotonic() + patience_s
        while (found := _ADDRESS.search(self.log.read_text())) is None:
            assert time.monotonic() < end_s and self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)
        return found[1]

    def engine_pids(self) -> list[int]:
        """The process ids of its engine; none while it is being replaced."""
        return [pid for pid in children_of(self.pid) if "engine --fd " in command_of(pid)]

    def signal_engine(self, number: int, patience_s: float = 60.0) -> int:
        """Send a signal to the engine process; return its id."""
        end_s = time.monotonic() + patience_s
        while not (pids := self.engine_pids()):
            assert time.monotonic() < end_s and self.process.poll() is None, self.log.read_text()
            time.sleep(0.01)
        os.kill(pids[0], number)
        return pids[0]


def make_secret(folder: Path) -> Path:
    """Write a secret for the wire."""
    path = folder / "fleet.secret"
    path.write_text(secrets.token_hex(32))
    path.chmod(0o600)
    return path


@contextlib.contextmanager
def engine_host(
    folder: Path,
    secret: Path,
    *flags: str,
    listen: str = "127.0.0.1:0",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[HostProcess]:
    """Run an engine until the block ends."""
    log = folder / f"engine-{time.monotonic_ns()}.log"
    command = [TIERCEL, "engine", "--listen", listen, "--engine-secret-file", str(secret)]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TIERCEL_", "VLLM_"))}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--calibration-seconds", "0", *flags],
            stdout=out,
            stderr=out,
            env=inherited | dict(environment),
            cwd=folder,
        )
    try:
        yield HostProcess(process, log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait()


@dataclass
class StreamedText:
    """One streamed answer."""

    text: str = ""
    finish_reason: str | None = None
    error: str = ""
    times_s: list[float] = field(default_factory=list[float])

    @property
    def said(self) -> tuple[str, str | None]:
        return self.text, self.finish_reason


def draw_bodies(count: int, max_tokens: int) -> list[dict[str, object]]:
    """Return requests, greedy and with a seed by turns."""
    return [
        {
            "prompt": f"Story {number}: " + "once upon a time there was a fox. " * (1 + number % 5),
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            **({"temperature": 0} if number % 2 else {"temperature": 0.9, "seed": number}),
        }
        for number in range(count)
    ]


async def stream_all(
    url: str, bodies: Sequence[dict[str, object]], disturb: Callable[[list[StreamedText]], Awaitable[None]], salt: str
) -> list[StreamedText]:
    """Stream all answers at once while `disturb` runs; return them when both have ended."""
    answers = [StreamedText() for _ in bodies]
    limits = httpx.Limits(max_connections=len(bodies))
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http, asyncio.TaskGroup() as group:
        for answer, body in zip(answers, bodies, strict=True):
            group.create_task(_stream(http, {**body, "cache_salt": salt}, answer))
        group.create_task(_run(disturb(answers)))
    return answers


async def undisturbed(answers: list[StreamedText]) -> None:
    """Do nothing to the engines."""


async def tokens_of(answers: list[StreamedText], count: int) -> None:
    """Wait until the streams have this many pieces together."""
    while sum(len(answer.times_s) for answer in answers) < count:
        assert not any(answer.error for answer in answers), answers
        await asyncio.sleep(0.01)


def longest_gap_s(answers: Sequence[StreamedText]) -> float:
    """Return the longest time between two pieces of one stream."""
    return max(b - a for one in answers for a, b in zip(one.times_s, one.times_s[1:], strict=False))


async def _run(work: Awaitable[None]) -> None:
    await work


async def _stream(http: httpx.AsyncClient, body: dict[str, object], answer: StreamedText) -> None:
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            answer.error = (await response.aread()).decode()
            return
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                answer.error = line
                continue
            for choice in event["choices"]:
                answer.text += choice["text"]
                answer.finish_reason = choice["finish_reason"] or answer.finish_reason
                answer.times_s.append(time.monotonic())


class Partition:
    """A proxy that forwards bytes both ways, until it is told to stop: then it closes nothing and forwards nothing."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._flows = asyncio.Event()
        self._flows.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Partition"]:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            self._server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def part(self) -> None:
        """Stop forwarding on all connections, present and future ones."""
        self._flows.clear()

    def heal(self) -> None:
        """Forward again, what was held back first."""
        self._flows.set()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        # A server of asyncio logs the end of a connection that is cancelled as an error.
        with contextlib.suppress(asyncio.CancelledError):
            await self._forward(reader, writer)
        self._tasks.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        try:
            await self._flows.wait()
            up_reader, up_writer = await asyncio.open_connection(self._host, self._port)
            ends.append(up_writer)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, up_writer))
                group.create_task(self._pump(up_reader, writer))
        finally:
            for end in ends:
                end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(1 << 16):
                await self._flows.wait()
                writer.write(chunk)
                await writer.drain()
        writer.close()
