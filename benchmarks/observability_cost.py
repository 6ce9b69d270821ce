"""What metrics and traces cost: CPU time of the server and its engine with both, against without, in interleaved pairs.

    python benchmarks/observability_cost.py [--pairs 20] [--requests 64] [--tokens 64] [--streams 8] [FLAG ...]

Two daemons live side by side and serve the same streams in turns: on, off, off, on and so on. The one with everything
on is `tiercel serve --otlp-traces-endpoint`, with a collector on loopback that gets every trace before the CPU time is
read, and is scraped every 5 s and once an arm at least. Metrics have no switch, so the other one is started from here
with the methods that count replaced by nothing, and its engine tells no tier, route or tenant. Both write their log
line a request. Other flags go to both, with `--threads 1` unless they say otherwise: threads that wait for each other
spin, which is CPU time too. The model is the embedded one unless `--model` names another.

Prints the difference as a share of the CPU time without: the mean over the pairs with its 95 % interval (bootstrap),
for both processes together and for each. Exit code 1 when the upper end for both together is over 2 %.
"""

import argparse
import asyncio
import contextlib
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

TIERCEL = str(Path(sys.executable).with_name("tiercel"))
MOST_SHARE = 0.02
SCRAPE_S = 5.0
WORDS = ("river", "stone", "lamp", "bread", "garden", "winter", "letter", "copper", "window", "market", "silver")
_COUNTS = ("on_http", "on_rejected", "on_throttled", "on_stream_error", "on_token", "on_finished", "on_step")
_URL = re.compile(r"tiercel serves \S+ at (http://\S+)")


@dataclass(frozen=True)
class Spent:
    """CPU seconds of one arm."""

    server: float
    engine: float

    @property
    def total(self) -> float:
        return self.server + self.engine


class Collector:
    """Counts traces that arrive on loopback."""

    def __init__(self) -> None:
        self.traces = 0
        collector = self

        class Handler(BaseHTTPRequestHandler):
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
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1/traces"


class Daemon:
    """One server and its engine."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path, collector: Collector | None) -> None:
        self.process = process
        self.collector = collector  # None: nothing is counted and nothing traced
        self.url = _await_url(process, log)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        self.engine_pid = int(children[0])

    def spent(self) -> Spent:
        """Since its start."""
        return Spent(_cpu_s(self.process.pid), _cpu_s(self.engine_pid))


def _await_url(process: "subprocess.Popen[str]", log: Path) -> str:
    while process.poll() is None:
        if found := _URL.search(log.read_text()):
            return found[1]
        time.sleep(0.05)
    raise SystemExit(log.read_text())


def _cpu_s(pid: int) -> float:
    """CPU time of a whole process, ended threads included (`clock_getcpuclockid`)."""
    return time.clock_gettime((~pid << 3) | 2)


@contextlib.contextmanager
def daemon(folder: Path, flags: list[str], collector: Collector | None) -> Iterator[Daemon]:
    """Serve until the block ends."""
    if collector is None:
        command = [sys.executable, __file__, "--serve-without", *flags]
    else:
        command = [TIERCEL, "serve", *flags, "--otlp-traces-endpoint", collector.url]
    log = folder / f"{'off' if collector is None else 'on'}.log"
    with log.open("w") as out:
        process = subprocess.Popen([*command, "--port", "0"], stdout=out, stderr=out, text=True)
    try:
        yield Daemon(process, log, collector)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


async def arm(server: Daemon, args: argparse.Namespace, seed: int) -> Spent:
    """Serve the streams of one seed; the CPU time that took, until the last trace is out."""
    rng = random.Random(seed)
    prompts = [" ".join(rng.choices(WORDS, k=args.prompt)) for _ in range(args.requests)]
    sent = 0 if server.collector is None else server.collector.traces
    gate = asyncio.Semaphore(args.streams)
    async with httpx.AsyncClient(base_url=server.url, timeout=600) as http:
        before = server.spent()
        scraping = asyncio.create_task(_scrape(http)) if server.collector is not None else None

        async def ask(prompt: str) -> None:
            body = {"prompt": prompt, "stream": True, "temperature": 0, "max_tokens": args.tokens, "ignore_eos": True}
            async with gate, http.stream("POST", "/v1/completions", json=body) as answer:
                last = b""
                async for chunk in answer.aiter_bytes():
                    last = (last + chunk)[-1024:]
                assert answer.status_code == 200, last
                assert b'"finish_reason":"length"' in last, last

        await asyncio.gather(*map(ask, prompts))
        if scraping is not None:
            scraping.cancel()
        await asyncio.sleep(args.settle_s)
        while server.collector is not None and server.collector.traces < sent + args.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        after = server.spent()
    return Spent(after.server - before.server, after.engine - before.engine)


async def _scrape(http: httpx.AsyncClient) -> None:
    while True:
        (await http.get("/metrics")).raise_for_status()
        await asyncio.sleep(SCRAPE_S)


def interval(shares: list[float]) -> tuple[float, float]:
    """Of the mean, 95 %."""
    rng = random.Random(0)
    means = sorted(statistics.fmean(rng.choices(shares, k=len(shares))) for _ in range(10_000))
    return means[250], means[9_749]


def report(pairs: list[tuple[Spent, Spent]], args: argparse.Namespace) -> bool:
    """Print the table; True when it costs no more than it may."""
    upper = 0.0
    print(f"\nCPU time, {len(pairs)} pairs of {args.requests} streams of {args.tokens} tokens, {args.streams} at once")
    for name in ("total", "server", "engine"):
        offs = [getattr(off, name) for _, off in pairs]
        shares = [getattr(on, name) / getattr(off, name) - 1 for on, off in pairs]
        low, high = interval(shares)
        upper = high if name == "total" else upper
        print(
            f"{name:>8}: without {statistics.fmean(offs):.3f} s an arm; metrics and traces cost"
            f" {100 * statistics.fmean(shares):+.2f} %  [{100 * low:+.2f}, {100 * high:+.2f}]"
        )
    is_good = upper <= MOST_SHARE
    print(f"at most {100 * MOST_SHARE:.0f} %: {'yes' if is_good else 'NO'}; load average {os.getloadavg()[0]:.1f}")
    return is_good


def measure(args: argparse.Namespace, flags: list[str]) -> bool:
    """All pairs; whether they cost no more than they may."""
    collector = Collector()
    pairs: list[tuple[Spent, Spent]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        daemon(Path(folder), flags, collector) as on,
        daemon(Path(folder), flags, None) as off,
    ):
        for server in (on, off):
            asyncio.run(arm(server, args, seed=-1))
        for number in range(args.pairs):
            order = (on, off) if number % 2 == 0 else (off, on)
            spent = {server: asyncio.run(arm(server, args, number)) for server in order}
            pairs.append((spent[on], spent[off]))
            share = 100 * (spent[on].total / spent[off].total - 1)
            print(f"pair {number + 1}: with {spent[on].total:.3f} s, without {spent[off].total:.3f} s, {share:+.2f} %")
    return report(pairs, args)


def serve_without(flags: list[str]) -> int:
    """`tiercel serve` that counts nothing."""
    from cli.main import main as run_command
    from server import launch
    from server.metrics import ServerMetrics

    for name in _COUNTS:
        setattr(ServerMetrics, name, lambda *_, **__: None)
    launch.engine_command = lambda: (sys.executable, __file__, "--engine-without")
    sys.argv = ["tiercel", "serve", *flags]
    run_command()
    return 0


def engine_without() -> int:
    """The engine, telling no more than admission needs."""
    from engine.loop import EngineLoop
    from engine.process import main as run_engine

    tell = EngineLoop.gauges
    EngineLoop.gauges = lambda loop, step_tokens=0, *, is_full=True: tell(loop, step_tokens, is_full=False)
    return run_engine()


def main() -> None:
    if sys.argv[1:2] == ["--serve-without"]:
        sys.exit(serve_without(sys.argv[2:]))
    if sys.argv[1:2] == ["--engine-without"]:
        sys.argv.pop(1)
        code = engine_without()
        sys.stderr.flush()
        os._exit(code)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--requests", type=int, default=64, help="of one arm")
    parser.add_argument("--tokens", type=int, default=64, help="of one answer")
    parser.add_argument("--prompt", type=int, default=48, help="words of one prompt")
    parser.add_argument("--streams", type=int, default=8, help="at once")
    parser.add_argument("--settle-s", type=float, default=5.5, help="at the end of each arm, for the last traces")
    args, flags = parser.parse_known_args()
    flags = flags if "--threads" in flags else ["--threads", "1", *flags]
    sys.exit(0 if measure(args, flags) else 1)


if __name__ == "__main__":
    main()
