"""CPU time of the HTTP process per streamed token.

    python benchmarks/streaming_cost.py [--baseline CHECKOUT] [--engine scripted] [--streams 16] [--rounds 5] [FLAG ...]

A round is a batch of simultaneous streams with short answers and one with long answers, to `tiercel serve` with the
embedded model, or with `--engine scripted` to an engine that computes nothing and ends a step every `--step-ms`. The
difference of the two batches is the cost per token, the rest the cost per request. Other flags go to the daemon; the
default is `--threads 1`, so that the HTTP process has a core.

With `--baseline`, the server of another checkout of the project takes turns with this one's.

Prints medians over the rounds. Exit code 1 if a streamed token of this checkout costs more than `--most-us` (45).
"""

import argparse
import contextlib
import json
import os
import random
import re
import selectors
import socket
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.daemon import Daemon, cpu_s, running_daemon

MOST_US = 45.0
SHORT, LONG = 16, 144  # tokens of an answer
HERE = Path(__file__).resolve()
WORDS = ("river", "stone", "lamp", "bread", "garden", "winter", "letter", "copper", "window", "market", "silver")
ROUTES = {"chat": "/v1/chat/completions", "text": "/v1/completions"}
_COUNT = re.compile(rb'"completion_tokens":(\d+)')


@dataclass(frozen=True)
class Cost:
    """Microseconds of CPU time of the HTTP process."""

    token: float
    request: float
    writes: float  # reads of the client per token


class Client:
    """Sends requests all at once and reads their answers, with little CPU time of its own."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._address = host, int(port)

    def run(self, route: str, bodies: Sequence[dict[str, object]]) -> int:
        """Return the number of reads until all answers were complete. Raises SystemExit if one is not."""
        with contextlib.ExitStack() as closing, selectors.DefaultSelector() as ready:
            tails: dict[socket.socket, bytes] = {}
            for body in bodies:
                sock = closing.enter_context(socket.create_connection(self._address))
                text = json.dumps(body)
                sock.sendall(
                    f"POST {route} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                    f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()
                )
                tails[sock] = b""
                ready.register(sock, selectors.EVENT_READ, body["max_tokens"])
            reads = 0
            while ready.get_map():
                for key, _ in ready.select():
                    sock = key.fileobj
                    assert isinstance(sock, socket.socket)
                    piece = sock.recv(1 << 16)
                    reads += 1
                    tails[sock] = (tails[sock] + piece)[-1024:]
                    if not piece:
                        ready.unregister(sock)
                        counted = _COUNT.findall(tails[sock])
                        if not counted or int(counted[-1]) != key.data:
                            raise SystemExit(f"an answer is not complete: {tails[sock]!r}")
            return reads


class Server:
    """A daemon under test and the load on it."""

    def __init__(self, name: str, daemon: Daemon, arguments: argparse.Namespace) -> None:
        self.name = name
        self._pid = daemon.process.pid
        self._client = Client(daemon.url)
        self._arguments = arguments
        self._rng = random.Random(1)

    def measure(self, *, stream: bool) -> Cost:
        """Run one round."""
        streams = self._arguments.streams
        short_us, short_reads = self._batch(SHORT, stream=stream)
        long_us, long_reads = self._batch(LONG, stream=stream)
        token_us = (long_us - short_us) / (streams * (LONG - SHORT))
        return Cost(
            token_us,
            short_us / streams - SHORT * token_us,
            (long_reads - short_reads) / (streams * (LONG - SHORT)),
        )

    def _batch(self, tokens: int, *, stream: bool) -> tuple[float, int]:
        """Return the CPU microseconds of a batch, and the reads of the client."""
        bodies = [self._body(tokens, stream=stream) for _ in range(self._arguments.streams)]
        before_s = cpu_s(self._pid)
        reads = self._client.run(ROUTES[self._arguments.route], bodies)
        return 1e6 * (cpu_s(self._pid) - before_s), reads

    def _body(self, tokens: int, *, stream: bool) -> dict[str, object]:
        text = " ".join(self._rng.choices(WORDS, k=self._arguments.prompt))
        asked = (
            {"prompt": text} if self._arguments.route == "text" else {"messages": [{"role": "user", "content": text}]}
        )
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        return {**asked, **options, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}


@contextlib.contextmanager
def open_servers(arguments: argparse.Namespace, flags: list[str]) -> Iterator[list[Server]]:
    """Serve from this checkout, and from the baseline if there is one."""
    checkouts = {"this": HERE.parents[1]}
    if arguments.baseline is not None:
        checkouts["baseline"] = arguments.baseline.resolve()
    with contextlib.ExitStack() as closing, tempfile.TemporaryDirectory() as folder:
        servers: list[Server] = []
        for name, checkout in checkouts.items():
            engine = () if arguments.engine == "model" else ("--step-ms", str(arguments.step_ms))
            command = (sys.executable, str(HERE), "--serve", " ".join(engine))
            daemon = closing.enter_context(
                running_daemon(flags, Path(folder, name), command=command, environment={"PYTHONPATH": str(checkout)})
            )
            servers.append(Server(name, daemon, arguments))
        yield servers


def measure(arguments: argparse.Namespace, flags: list[str]) -> int:
    """Print the table. Return the exit code."""
    costs: dict[tuple[str, bool], list[Cost]] = {}
    with open_servers(arguments, flags) as servers:
        for round_number in range(arguments.rounds + 1):
            for server in servers if round_number % 2 else reversed(servers):
                for stream in (True, False) if arguments.whole else (True,):
                    cost = server.measure(stream=stream)
                    if round_number:  # the first one warms up
                        costs.setdefault((server.name, stream), []).append(cost)
    print(
        f"CPU time of the HTTP process, {arguments.streams} streams, route {arguments.route}, {arguments.rounds} rounds"
    )
    print(f"{'':>10} {'':>10} {'µs per token':>24} {'µs per request':>16} {'reads per token':>16}")
    for (name, stream), rows in sorted(costs.items()):
        tokens = [row.token for row in rows]
        print(
            f"{name:>10} {'streamed' if stream else 'whole':>10}"
            f" {statistics.median(tokens):8.1f} ({min(tokens):5.1f} to {max(tokens):5.1f})"
            f" {statistics.median(row.request for row in rows):16.0f}"
            f" {statistics.median(row.writes for row in rows):16.2f}"
        )
    token_us = statistics.median(cost.token for cost in costs["this", True])
    print(f"at most {arguments.most_us:.0f} µs per streamed token: {'yes' if token_us <= arguments.most_us else 'NO'}")
    return int(token_us > arguments.most_us)


def serve(engine: list[str], flags: list[str]) -> int:
    """Run `tiercel serve`, with the scripted engine if `engine` has flags for it."""
    from tiercel.cli.main import main as run_command
    from tiercel.server import launch

    if engine:
        command = (sys.executable, str(HERE.with_name("scripted_engine.py")), *engine)
        launch.engine_command = lambda: command
    return run_command(["serve", *flags])


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        return serve(sys.argv[2].split(), sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", type=Path, help="another checkout")
    parser.add_argument("--engine", choices=("model", "scripted"), default="model")
    parser.add_argument("--step-ms", type=float, default=8.0, help="pause of the scripted engine before a step")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--route", choices=tuple(ROUTES), default="chat")
    parser.add_argument("--prompt", type=int, default=32, help="words of a prompt")
    parser.add_argument("--whole", action="store_true", help="also measure answers that are not streamed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most-us", type=float, default=MOST_US)
    arguments, flags = parser.parse_known_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return measure(arguments, flags if "--threads" in flags else ["--threads", "1", *flags])


if __name__ == "__main__":
    sys.exit(main())
