"""Hostile clients beside real traffic: memory of the HTTP process, and the latency of others.

    python benchmarks/hostile_clients.py [--only memory | slow] [--seconds 8] [--rounds 3] [--control]

The daemon runs with an engine that computes nothing, so that only the HTTP process matters.

*memory*: headers, request lines, chunk extensions and trailers without an end, a header of 10 MB, many short lines, 400
unfinished heads, and 40 unfinished bodies of 8 MiB. The peak of the HTTP process stays below 200 MB, and a minute later
it is within 1.5 times the level at rest.

*slow*: 250 idle connections, 125 that send a byte of a header each second, and 125 that send a byte of a body each
second; those that are closed come back. The 95th percentile of the latency of real requests is at most 10 % higher than
without them (the median of the rounds), idle connections are closed, and in the end none of them is left.

Exit code 1 if a check is missed. `--control` serves without the guards: the limits on heads, connections, bodies and
times, and the return of memory. At least one check of each part must then fail, and the exit code says whether it did.
The memory part takes about 80 s, the slow one 2 x rounds x seconds.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from benchmarks.checks import missed_checks, percentile
from benchmarks.daemon import Daemon, running_daemon
from benchmarks.streaming_client import TimedRequest, closed_loop

PEAK_BYTES = 200_000_000
REST_FACTOR, SLOWER = 1.5, 1.10
MIB = 1024 * 1024
HERE = Path(__file__).resolve()
GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
UNGUARDED = ["--timeout-headers", "86400", "--timeout-body", "86400", "--timeout-keep-alive", "86400"]
UNGUARDED += ["--max-pending-body-bytes", "100G"]


def memory_bytes(pid: int, field: str) -> int:
    """Return a field of /proc/PID/status: VmRSS now, VmHWM the peak."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"no {field} in /proc/{pid}/status")


async def flood(port: int, begin: bytes, piece: bytes, count: int) -> None:
    """Send a request that does not end, until the server closes the connection or all is sent."""
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begin)
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(5):
                for _ in range(count):
                    writer.write(piece)
                    await writer.drain()
        writer.close()


async def unfinished(port: int, connections: int, sent: bytes, seconds: float) -> None:
    """Keep connections open that have sent the beginning of a request."""

    async def keep() -> None:
        with contextlib.suppress(OSError, TimeoutError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            async with asyncio.timeout(seconds):
                await writer.drain()
            await asyncio.sleep(seconds)
            writer.close()

    await asyncio.gather(*(keep() for _ in range(connections)))


async def attack_memory(port: int, report: Callable[[str], None]) -> None:
    """Send each kind of request that takes memory, one after the other."""
    body = b'{"prompt": "' + b"a" * (8 * MIB - 100)
    attacks: list[tuple[str, Callable[[], Awaitable[object]]]] = [
        ("headers without an end", lambda: flood(port, GET, (b"X-A: " + b"a" * 60_000 + b"\r\n") * 10, 300)),
        ("a header of 10 MB", lambda: flood(port, GET + b"A: ", b"a" * MIB, 10)),
        ("a request line without an end", lambda: flood(port, b"GET /", b"a" * MIB, 100)),
        ("short lines without an end", lambda: flood(port, GET, b"a:\r\n" * 100_000, 300)),
        ("an extension without an end", lambda: flood(port, CHUNKED + b"1;", b"a" * MIB, 100)),
        ("trailers without an end", lambda: flood(port, CHUNKED + b"0\r\n", b"a:\r\n" * 100_000, 300)),
        ("400 unfinished heads", lambda: unfinished(port, 400, GET + b"A: " + b"a" * 60_000, 3)),
        (
            "40 unfinished bodies",
            lambda: unfinished(port, 40, POST + b"Content-Length: %d\r\n\r\n" % (8 * MIB) + body, 5),
        ),
    ]
    for name, attack in attacks:
        await attack()
        report(name)


def measure_memory(daemon: Daemon, port: int) -> list[tuple[str, bool]]:
    """Attack; return the checks."""
    pid = daemon.process.pid
    ask_some(daemon.url, 3)
    rest = memory_bytes(pid, "VmRSS")
    print(f"memory: at rest {rest / 1e6:.0f} MB")

    def report(name: str) -> None:
        now, peak = memory_bytes(pid, "VmRSS"), memory_bytes(pid, "VmHWM")
        print(f"  {name:32} {now / 1e6:5.0f} MB now, {peak / 1e6:5.0f} MB peak")

    asyncio.run(attack_memory(port, report))
    peak = memory_bytes(pid, "VmHWM")
    time.sleep(60)
    after = memory_bytes(pid, "VmRSS")
    return [
        (f"peak {peak / 1e6:.0f} MB, below {PEAK_BYTES / 1e6:.0f} MB", peak < PEAK_BYTES),
        (
            f"a minute later {after / 1e6:.0f} MB, within {REST_FACTOR} x {rest / 1e6:.0f} MB",
            after <= REST_FACTOR * rest,
        ),
    ]


async def _pester(port: int, begin: bytes, piece: bytes) -> None:
    """Connect, send the beginning, then a byte each second; come back when the server closes the connection."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(begin)
                answering = asyncio.create_task(reader.read())
                while not answering.done():
                    writer.write(piece)
                    await asyncio.wait([answering], timeout=1.0)
                await answering
            finally:
                writer.close()
        await asyncio.sleep(1.0)


def pester(port: int, connections: int) -> None:
    """Keep slow connections: half idle, a quarter in their headers, a quarter in their bodies."""

    async def all_of_them() -> None:
        kinds = [(b"", b""), (GET + b"A: ", b"a"), (b"", b""), (POST + b"Content-Length: 9000\r\n\r\n", b" ")]
        await asyncio.gather(*(_pester(port, *kinds[number % 4]) for number in range(connections)))

    os.nice(19)  # they would be other machines: their own work must not slow the server down
    asyncio.run(all_of_them())


@contextlib.contextmanager
def pestered(port: int, connections: int) -> Iterator[None]:
    """Have slow clients, in a process of their own, until the block ends."""
    process = multiprocessing.get_context("spawn").Process(target=pester, args=(port, connections), daemon=True)
    process.start()
    try:
        time.sleep(3.0)
        yield
    finally:
        process.terminate()
        process.join()


def ask_some(url: str, seconds: float) -> float:
    """Return the 95th percentile of the seconds of requests in a closed loop of four."""
    requests = [TimedRequest(at_s=0, prompt=[5] * 32, outputs=8)] * 100_000
    answers = closed_loop(url, requests, 4, seconds)
    if any(not answer.is_complete for answer in answers):
        raise SystemExit(f"a request of real traffic failed: {[a.refusal for a in answers if not a.is_complete][:1]}")
    return percentile((answer.end_s - answer.due_s for answer in answers if answer.end_s is not None), 0.95)


def open_sockets(pid: int) -> int:
    """Return the number of sockets of a process."""
    count = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            count += entry.readlink().name.startswith("socket:")
    return count


async def idle_end_s(port: int, limit_s: float) -> float:
    """Return after how long the server closes a connection that sends nothing; infinite beyond the limit."""
    began_s = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(limit_s):
            await reader.read()
    except TimeoutError:
        return float("inf")
    finally:
        writer.close()
    return time.monotonic() - began_s


def measure_slow(daemon: Daemon, port: int, arguments: argparse.Namespace) -> list[tuple[str, bool]]:
    """Measure real traffic without and with slow clients in turns; return the checks."""
    pid = daemon.process.pid
    ask_some(daemon.url, 3)
    before = open_sockets(pid)
    ratios: list[float] = []
    for number in range(arguments.rounds):
        quiet_s = ask_some(daemon.url, arguments.seconds)
        with pestered(port, arguments.connections):
            count = open_sockets(pid) - before
            hostile_s = ask_some(daemon.url, arguments.seconds)
        ratios.append(hostile_s / quiet_s)
        print(
            f"slow: round {number + 1}: P95 {quiet_s * 1e3:.1f} ms alone, {hostile_s * 1e3:.1f} ms beside {count} slow"
        )
    ratio = statistics.median(ratios)
    ended_s = asyncio.run(idle_end_s(port, 15.0))
    left = open_sockets(pid) - before
    return [
        (f"P95 beside slow clients {ratio:.2f} x, at most {SLOWER:.2f} x", ratio <= SLOWER),
        (f"an idle connection is closed after {ended_s:.1f} s", ended_s < 15.0),
        (f"{left} connections left, at most 2", left <= 2),
    ]


def serve(flags: list[str], *, has_guards: bool) -> int:
    """Run `tiercel serve` with an engine that computes nothing."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    from tiercel.cli.main import main as run_command
    from tiercel.server import launch
    from tiercel.server.control import memory
    from tiercel.server.http import uvicorn_server

    engine = (sys.executable, str(HERE.with_name("scripted_engine.py")), "--step-ms", "5")
    launch.engine_command = lambda: engine
    if not has_guards:

        class Unguarded(HttpToolsProtocol):
            @staticmethod
            def factory(_gate: object) -> type[HttpToolsProtocol]:
                return HttpToolsProtocol

        uvicorn_server.BodyWritingProtocol = Unguarded  # type: ignore[assignment,misc]
        launch.return_large_buffers = lambda: None
        memory.MemoryTrimmer.is_due = lambda _self: False  # type: ignore[method-assign]
    return run_command(["serve", *flags])


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        return serve(sys.argv[3:], has_guards=sys.argv[2] == "guarded")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("memory", "slow"), help="one part; default: both")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a measurement of real traffic")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=int, default=500, help="slow connections")
    parser.add_argument("--control", action="store_true", help="serve without the guards; the checks must fail")
    arguments = parser.parse_args()
    is_expected = True
    for part in ("memory", "slow"):
        if arguments.only not in (None, part):
            continue
        command = (sys.executable, str(HERE), "--serve", "unguarded" if arguments.control else "guarded")
        with tempfile.TemporaryDirectory() as folder:
            flags = UNGUARDED if arguments.control else []
            with running_daemon(["--no-enable-log-requests", *flags], Path(folder, "log"), command=command) as daemon:
                port = int(daemon.url.rpartition(":")[2])
                checks = measure_memory(daemon, port) if part == "memory" else measure_slow(daemon, port, arguments)
            missed = missed_checks(checks)
        is_expected &= bool(missed) == arguments.control
    return int(not is_expected)


if __name__ == "__main__":
    sys.exit(main())
