"""CPU time of metrics and traces: server and engine with both and without, in interleaved pairs.

    python benchmarks/observability_cost.py [--pairs 20] [--requests 64] [--tokens 64] [--streams 8] [FLAG ...]

One daemon serves streams in short turns: on, off, off, on and so on; eight turns are a pair. Two daemons side by side
would differ by some per cent because of the placement of their memory. A signal to both processes switches. On: every
request is traced to a collector on loopback, and /metrics is scraped after every 5 s. Off: the
counting methods are replaced by empty ones, no trace is begun, and the engine reports no tier, route or tenant. Both
halves of a pair have the same prompts, and each turn has a cache of its own (`cache_salt`). The CPU time of a turn is
read after its last export; remaining traces are exported at the end of the pair. After each turn the benchmark checks
that all tokens were counted, or none; after each pair, that exactly the traces of its requests have arrived. The log
line of a request is written in both.

Other flags go to the daemon. The default is `--threads 1`, because threads that wait for each other spin, which uses
CPU time. Without `--model` the model is the embedded one.

Prints the difference as a share of the CPU time without: mean over the pairs with its 95 % interval (bootstrap) and
median, for both processes together and for each, and the microseconds per request. Exit code 1 if the upper end for
both together is above 2 %.
"""

import argparse
import asyncio
import contextlib
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from benchmarks.daemon import Daemon, cpu_s, running_daemon

MAX_SHARE = 0.02
SCRAPE_S = 5.0
TURNS = (True, False, False, True, True, False, False, True)
"""Of a pair: what drifts evenly cancels out."""

EXPORT_TRACES = 64
OFF, ON, EXPORT = signal.SIGUSR1, signal.SIGUSR2, signal.SIGRTMIN
WORDS = ("river", "stone", "lamp", "bread", "garden", "winter", "letter", "copper", "window", "market", "silver")
_AFTERMATH_S = 0.1  # a request is counted, logged and traced after its client has the answer
_COUNTS = (
    *("on_http", "on_rejected", "on_throttled", "on_stream_error"),
    *("on_first_token", "on_tokens", "on_finished", "on_step"),
)
_COUNTED = re.compile(r"^vllm:generation_tokens_total\S* (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Spent:
    """CPU seconds of both processes."""

    server: float
    engine: float

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.server + other.server, self.engine + other.engine)

    @property
    def total(self) -> float:
        return self.server + self.engine


class Collector:
    """Counts traces that arrive on loopback."""

    def __init__(self) -> None:
        self.traces = 0
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # keeps the connection, as collectors do

            def do_POST(self) -> None:
                request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
                spans = [
                    span
                    for batch in request.resource_spans
                    for scope in batch.scope_spans
                    for span in scope.spans
                    if span.kind == Span.SPAN_KIND_SERVER
                ]
                collector.traces += len(spans)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1/traces"


class ObservedDaemon:
    """A daemon, its engine process, and the collector of its traces."""

    def __init__(self, daemon: Daemon, collector: Collector) -> None:
        self.process = daemon.process
        self.collector = collector
        self.url = daemon.url
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        self.engine_pid = int(children[0])

    def spent(self) -> Spent:
        """Return the CPU seconds since the start."""
        return Spent(cpu_s(self.process.pid), cpu_s(self.engine_pid))

    def switch(self, *, is_on: bool) -> None:
        """Switch counting and tracing on or off."""
        for pid in (self.process.pid, self.engine_pid):
            os.kill(pid, ON if is_on else OFF)
        time.sleep(0.1)

    async def export(self, traces: int) -> None:
        """Export until the collector has this many traces."""
        os.kill(self.process.pid, EXPORT)
        while self.collector.traces < traces:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@contextlib.contextmanager
def observed_daemon(flags: list[str]) -> Iterator[ObservedDaemon]:
    """Serve with a collector until the block ends."""
    collector = Collector()
    flags = [*flags, "--otlp-traces-endpoint", collector.url]
    with (
        tempfile.TemporaryDirectory() as folder,
        running_daemon(flags, Path(folder, "log"), command=(sys.executable, __file__, "--serve")) as daemon,
    ):
        yield ObservedDaemon(daemon, collector)


class Scraper:
    """Scrapes every few seconds while it is active."""

    def __init__(self) -> None:
        self._left_s = SCRAPE_S / 2

    @contextlib.asynccontextmanager
    async def scraping(self, http: httpx.AsyncClient) -> AsyncIterator[None]:
        """Scrape until the block ends."""
        task = asyncio.create_task(self._run(http))
        start_s = time.monotonic()
        yield
        task.cancel()
        self._left_s -= time.monotonic() - start_s

    async def _run(self, http: httpx.AsyncClient) -> None:
        while True:
            await asyncio.sleep(self._left_s)
            self._left_s += SCRAPE_S
            (await http.get("/metrics")).raise_for_status()


class Bench:
    """The load of one daemon."""

    def __init__(self, server: ObservedDaemon, args: argparse.Namespace) -> None:
        self._server = server
        self._args = args
        self._scraper = Scraper()
        self._turns = {True: 0, False: 0}
        self._traced = 0  # requests

    async def pair(self) -> tuple[Spent, Spent]:
        """Measure one pair: with and without."""
        spent = {True: Spent(0.0, 0.0), False: Spent(0.0, 0.0)}
        for place, is_on in enumerate(TURNS):
            spent[is_on] += await self._turn(is_on=is_on, is_last=place == len(TURNS) - 1)
        assert self._server.collector.traces == self._traced
        return spent[True], spent[False]

    async def _turn(self, *, is_on: bool, is_last: bool) -> Spent:
        """Serve some streams. Return the CPU time."""
        server, args = self._server, self._args
        self._turns[is_on] += 1
        rng = random.Random(self._turns[is_on])
        salt = f"{self._turns[is_on]}-{'on' if is_on else 'off'}"
        requests = args.requests // TURNS.count(True)
        server.switch(is_on=is_on)
        async with httpx.AsyncClient(base_url=server.url, timeout=600) as http:
            counted = await _counted(http)
            before = server.spent()
            async with self._scraper.scraping(http) if is_on else contextlib.nullcontext():
                gate = asyncio.Semaphore(args.streams)
                prompts = [" ".join(rng.choices(WORDS, k=args.prompt)) for _ in range(requests)]
                await asyncio.gather(*(self._ask(http, gate, prompt, salt) for prompt in prompts))
            await asyncio.sleep(_AFTERMATH_S)
            if is_on:
                self._traced += requests
                if is_last or self._traced - server.collector.traces >= EXPORT_TRACES:
                    await server.export(self._traced)
            after = server.spent()
            counted = await _counted(http) - counted
        assert counted == (requests * args.tokens if is_on else 0), "not on, or not off"
        return Spent(after.server - before.server, after.engine - before.engine)

    async def _ask(self, http: httpx.AsyncClient, gate: asyncio.Semaphore, prompt: str, salt: str) -> None:
        body = {
            "prompt": prompt,
            "max_tokens": self._args.tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "cache_salt": salt,
        }
        async with gate, http.stream("POST", "/v1/completions", json=body) as answer:
            last = b""
            async for chunk in answer.aiter_bytes():
                last = (last + chunk)[-1024:]
            assert answer.status_code == 200, last
            assert b'"finish_reason":"length"' in last, last


async def _counted(http: httpx.AsyncClient) -> int:
    """Return the number of tokens that /metrics has counted."""
    found = _COUNTED.search((await http.get("/metrics")).raise_for_status().text)
    return 0 if found is None else int(float(found[1]))


def interval(shares: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean."""
    rng = random.Random(0)
    means = sorted(statistics.fmean(rng.choices(shares, k=len(shares))) for _ in range(10_000))
    return means[250], means[9_749]


def report(pairs: list[tuple[Spent, Spent]], args: argparse.Namespace) -> bool:
    """Print the table. Return whether the cost is within the limit."""
    upper = 0.0
    print(f"\nCPU time, {len(pairs)} pairs of {args.requests} streams of {args.tokens} tokens, {args.streams} at once")
    for name in ("total", "server", "engine"):
        ons, offs = ([getattr(spent, name) for spent in side] for side in zip(*pairs, strict=True))
        shares = [on / off - 1 for on, off in zip(ons, offs, strict=True)]
        extra_us = [1e6 * (on - off) / args.requests for on, off in zip(ons, offs, strict=True)]
        low, high = interval(shares)
        upper = high if name == "total" else upper
        print(
            f"{name:>8}: without {1e6 * statistics.fmean(offs) / args.requests:6.0f} µs a request, metrics and traces"
            f" {statistics.fmean(extra_us):+5.0f} (median {statistics.median(extra_us):+5.0f}) µs:"
            f" {100 * statistics.fmean(shares):+.2f} % [{100 * low:+.2f}, {100 * high:+.2f}],"
            f" median {100 * statistics.median(shares):+.2f} %"
        )
    is_good = upper <= MAX_SHARE
    print(f"at most {100 * MAX_SHARE:.0f} %: {'yes' if is_good else 'NO'}; load average {os.getloadavg()[0]:.1f}")
    return is_good


def measure(args: argparse.Namespace, flags: list[str]) -> bool:
    """Measure all pairs. Return whether the cost is within the limit."""
    pairs: list[tuple[Spent, Spent]] = []
    with observed_daemon(flags) as server:
        bench = Bench(server, args)
        asyncio.run(bench.pair())  # a warm-up
        for number in range(args.pairs):
            on, off = asyncio.run(bench.pair())
            pairs.append((on, off))
            share = 100 * (on.total / off.total - 1)
            print(f"pair {number + 1}: with {on.total:.3f} s, without {off.total:.3f} s, {share:+.2f} %", flush=True)
    return report(pairs, args)


def serve(flags: list[str]) -> int:
    """Run `tiercel serve` with counting and tracing switched by a signal."""
    from tiercel.cli.main import main as run_command
    from tiercel.server import composition, launch
    from tiercel.server.api import middleware
    from tiercel.server.metrics.registry import ServerMetrics
    from tiercel.server.tracing.export import TraceExport

    def nothing(*_: object) -> None: ...

    counting = {name: getattr(ServerMetrics, name) for name in _COUNTS}
    begin_context = middleware.begin_context

    def switch(is_on: bool) -> None:
        for name, method in counting.items():
            setattr(ServerMetrics, name, method if is_on else nothing)
        middleware.begin_context = begin_context if is_on else nothing  # without a context there is no trace

    def make_traces(endpoint: str | None) -> TraceExport:
        assert endpoint is not None
        export = TraceExport(
            endpoint, interval_s=3600.0
        )  # no export by time, which could fall into a turn without traces
        signal.signal(EXPORT, lambda *_: threading.Thread(target=export._processor.force_flush).start())
        return export

    _obey(switch)
    composition.make_traces = make_traces
    launch.engine_command = lambda: (sys.executable, __file__, "--engine")
    sys.argv = ["tiercel", "serve", *flags]
    run_command()
    return 0


def engine() -> int:
    """Run the engine, whose reports contain no more than admission needs while it is off."""
    from tiercel.engine.gauges import GaugeReader
    from tiercel.engine.process import main as run_engine

    read = GaugeReader.read

    def read_little(gauges: GaugeReader, step_tokens: int = 0, *, is_full: bool = True) -> object:
        return read(gauges, step_tokens, is_full=False)

    def switch(is_on: bool) -> None:
        GaugeReader.read = read if is_on else read_little

    _obey(switch)
    return run_engine()


def _obey(switch: Callable[[bool], None]) -> None:
    signal.signal(OFF, lambda *_: switch(False))
    signal.signal(ON, lambda *_: switch(True))


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        sys.exit(serve(sys.argv[2:]))
    if sys.argv[1:2] == ["--engine"]:
        sys.argv.pop(1)
        code = engine()
        sys.stderr.flush()
        os._exit(code)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--requests", type=int, default=64, help="of a pair, with and without each; at least 4")
    parser.add_argument("--tokens", type=int, default=64, help="of one answer")
    parser.add_argument("--prompt", type=int, default=48, help="words of one prompt")
    parser.add_argument("--streams", type=int, default=8, help="at once")
    args, flags = parser.parse_known_args()
    flags = flags if "--threads" in flags else ["--threads", "1", *flags]
    sys.exit(0 if measure(args, flags) else 1)


if __name__ == "__main__":
    main()
