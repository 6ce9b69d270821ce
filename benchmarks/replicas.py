"""Several engines behind one front: throughput over their number, and the pause of streams when one is lost.

    python benchmarks/replicas.py timed      engines that only take time: 1, 2 and 4 of them
    python benchmarks/replicas.py embedded   two engines of one thread beside a daemon with two threads
    python benchmarks/replicas.py losses     kills, a hang and a partition under 32 streams

`timed`: each engine (`benchmarks/scripted_engine.py`) has 16 rows and ends a step every 30 ms; the sockets, the hosts
and the front are real. Fails unless 2 engines give 1.9 times the tokens per second of one, and 4 give 3.8 times.

`embedded`: the embedded model in float32, `--rounds` turns of each side. Fails unless the median of the engines' rates
is at least 0.95 of the daemon's.

`losses`: `--kills` times SIGKILL of an engine, SIGSTOP of an engine, and a proxy that stops forwarding. Fails if a
stream fails or its text differs from that of the undisturbed fleet, if its longest pause is over 2 s after a kill, or
over the stall timeout and 2 s after a hang or partition.

`--control` shows that the checks can fail: the front knows the first engine only (`timed`), both engines share a core
(`embedded`), or the front waits 20 s before an engine counts as hung while 5 s are promised (`losses`).
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from benchmarks.checks import missed_checks
from benchmarks.daemon import Daemon, running_daemon
from benchmarks.streaming_client import TimedRequest, closed_loop
from tests.e2e.fleet import (
    HostProcess,
    Partition,
    StreamedText,
    draw_bodies,
    engine_host,
    longest_gap_s,
    make_secret,
    stream_all,
    tokens_of,
    undisturbed,
)

ROWS, STEP_MS = 16, 30.0
OUTPUTS = 64
LEAST = {2: 1.9, 4: 3.8}
LEAST_EMBEDDED = 0.95
STREAMS, KILL_S, MARGIN_S, STALL_S, CONTROL_STALL_S = 32, 2.0, 2.0, 3, 20
_MAX_REQUESTS_PER_S = 200  # more than are ever answered
_TIMED_ENGINE = Path(__file__).with_name("scripted_engine.py")
_HOST = """
import json, sys
from tiercel.settings.config import resolve
from tiercel.settings.engine_address import EngineAddress
from tiercel.server.hosting.launch import host_engine
settings = resolve({"engine_secret_file": sys.argv[1]}).settings
sys.exit(host_engine(settings, EngineAddress("127.0.0.1", 0), command=json.loads(sys.argv[2])))
"""


@contextlib.contextmanager
def timed_host(folder: Path, secret: Path) -> Iterator[HostProcess]:
    """Host an engine that only takes time."""
    log = folder / f"timed-{time.monotonic_ns()}.log"
    engine = [sys.executable, str(_TIMED_ENGINE), "--step-ms", str(STEP_MS), "--rows", str(ROWS)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", _HOST, str(secret), json.dumps(engine)], stdout=out, stderr=out
        )
    try:
        yield HostProcess(process, log)
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def front(folder: Path, secret: Path, addresses: Sequence[str], *flags: str) -> Iterator[Daemon]:
    """Serve from these engines."""
    engines = ("--engines", f"static:{','.join(addresses)}", "--engine-secret-file", str(secret))
    with running_daemon(
        [*engines, "--no-enable-log-requests", *flags], folder / f"{time.monotonic_ns()}.log"
    ) as daemon:
        yield daemon


def rate(url: str, concurrency: int, seconds: float, seed: int) -> float:
    """Return the tokens per second of a closed loop, from the answers that ended in its time."""
    draw = random.Random(seed)
    requests = [
        TimedRequest(at_s=0.0, prompt=[draw.randrange(100, 1500) for _ in range(32)], outputs=OUTPUTS)
        for _ in range(int(_MAX_REQUESTS_PER_S * seconds))
    ]
    answers = closed_loop(url, requests, concurrency, seconds)
    failed = [answer for answer in answers if not answer.is_complete]
    if failed:
        raise SystemExit(
            f"{len(failed)} of {len(answers)} requests failed: {failed[0].status} {failed[0].refusal[:200]}"
        )
    span_s = max(answer.end_s or 0.0 for answer in answers)
    return sum(answer.tokens for answer in answers) / span_s


def timed(folder: Path, seconds: float, *, is_control: bool) -> list[tuple[str, bool]]:
    """Measure 1, 2 and 4 engines that only take time."""
    secret = make_secret(folder)
    rates: dict[int, float] = {}
    for count in (1, *LEAST):
        with contextlib.ExitStack() as running:
            hosts = [running.enter_context(timed_host(folder, secret)) for _ in range(count)]
            addresses = [host.wait_ready() for host in hosts]
            daemon = running.enter_context(front(folder, secret, addresses[:1] if is_control else addresses))
            rates[count] = rate(daemon.url, 2 * ROWS * count, seconds, count)
        print(
            f"{count} engines: {rates[count]:.0f} tokens/s, {rates[count] / (ROWS * 1000 / STEP_MS):.2f} engines' worth"
        )
    return [
        (
            f"{count} engines give {rates[count] / rates[1]:.2f} times one, at least {least}",
            rates[count] >= least * rates[1],
        )
        for count, least in LEAST.items()
    ]


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Let processes that are started in the block have one core together."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def embedded(folder: Path, seconds: float, rounds: int, *, is_control: bool) -> list[tuple[str, bool]]:
    """Measure two engines of one thread and one daemon with two threads, by turns."""
    secret = make_secret(folder)
    exact = ("--dtype", "float32")
    pairs: list[tuple[float, float]] = []
    for turn in range(rounds):
        with contextlib.ExitStack() as running:
            with one_core() if is_control else contextlib.nullcontext():
                hosts = [running.enter_context(engine_host(folder, secret, *exact, "--threads", "1")) for _ in range(2)]
            addresses = [host.wait_ready() for host in hosts]
            daemon = running.enter_context(front(folder, secret, addresses))
            rate(daemon.url, STREAMS, 1.0, 100 + turn)
            several = rate(daemon.url, STREAMS, seconds, turn)
        flags = [*exact, "--threads", "2", "--calibration-seconds", "0", "--no-enable-log-requests"]
        with running_daemon(flags, folder / f"one-{turn}.log") as one:
            rate(one.url, STREAMS, 1.0, 100 + turn)
            alone = rate(one.url, STREAMS, seconds, turn)
        pairs.append((several, alone))
        print(
            f"two engines of one thread {several:.0f} tokens/s, one daemon with two {alone:.0f}: {several / alone:.3f}"
        )
    share = statistics.median(pair[0] for pair in pairs) / statistics.median(pair[1] for pair in pairs)
    return [(f"two engines give {share:.3f} of one, at least {LEAST_EMBEDDED}", share >= LEAST_EMBEDDED)]


def losses(folder: Path, kills: int, *, is_control: bool) -> list[tuple[str, bool]]:
    """Lose engines in three ways."""
    return asyncio.run(_losses(folder, kills, CONTROL_STALL_S if is_control else STALL_S))


async def _losses(folder: Path, kills: int, stall_s: int) -> list[tuple[str, bool]]:
    secret, bodies = make_secret(folder), draw_bodies(STREAMS, 300)
    checks: list[tuple[str, bool]] = []
    exact = ("--dtype", "float32", "--threads", "1", "--stall-timeout", str(stall_s))
    with contextlib.ExitStack() as running:
        hosts = [running.enter_context(engine_host(folder, secret, *exact)) for _ in range(2)]
        addresses = [await asyncio.to_thread(host.wait_ready) for host in hosts]
        async with Partition(addresses[1]).running() as proxy:
            wanted = [addresses[0], proxy.address]
            serving = front(folder, secret, wanted, "--stall-timeout", str(stall_s))
            daemon = await asyncio.to_thread(running.enter_context, serving)
            await _wait_engines(daemon.url, 2)
            expected = await stream_all(daemon.url, bodies, undisturbed, "undisturbed")

            async def kill(answers: list[StreamedText]) -> None:
                await tokens_of(answers, STREAMS * 20)
                await asyncio.to_thread(hosts[0].signal_engine, signal.SIGKILL)

            async def stop(answers: list[StreamedText]) -> None:
                await tokens_of(answers, STREAMS * 20)
                await asyncio.to_thread(hosts[0].signal_engine, signal.SIGSTOP)

            async def part(answers: list[StreamedText]) -> None:
                await tokens_of(answers, STREAMS * 20)
                proxy.part()
                await _wait_engines(daemon.url, 1)
                proxy.heal()

            for name, disturb, limit_s in (
                *((f"kill {number + 1}", kill, KILL_S) for number in range(kills)),
                ("hang", stop, STALL_S + MARGIN_S),
                ("partition", part, STALL_S + MARGIN_S),
            ):
                answers = await stream_all(daemon.url, bodies, disturb, name.replace(" ", "-"))
                failed = sum(bool(answer.error) for answer in answers)
                wrong = sum(one.said != other.said for one, other in zip(answers, expected, strict=True))
                gap_s = longest_gap_s(answers)
                checks.append(
                    (
                        f"{name}: {failed} of {STREAMS} streams failed, {wrong} differ, longest pause {gap_s:.2f} s, "
                        f"at most {limit_s:.0f} s",
                        not failed and not wrong and gap_s <= limit_s,
                    )
                )
                await _wait_engines(daemon.url, 2)
    return checks


async def _wait_engines(url: str, count: int) -> None:
    """Wait until the front has this many engines that serve."""

    def ready() -> int:
        states: dict[str, str] = httpx.get(f"{url}/health").json()["engines"]
        return list(states.values()).count("ready")

    while await asyncio.to_thread(ready) != count:  # noqa: ASYNC110 - a state of another process
        await asyncio.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("timed", "embedded", "losses"))
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--control", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="replicas-") as name:
        folder = Path(name)
        match args.part:
            case "timed":
                checks = timed(folder, args.seconds, is_control=args.control)
            case "embedded":
                checks = embedded(folder, args.seconds, args.rounds, is_control=args.control)
            case _:
                checks = losses(folder, args.kills, is_control=args.control)
    return int(bool(missed_checks(checks)))


if __name__ == "__main__":
    sys.exit(main())
