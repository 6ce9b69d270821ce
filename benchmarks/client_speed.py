"""Stream chunks per second that the client of the load test reads, and the CPU time that it needs.

    python benchmarks/client_speed.py --chunks-per-s 20000
    python benchmarks/client_speed.py                        as fast as the stub can send

A stub server in processes of its own (on one shared port) streams prepared chunks of 200 bytes at the given rate; the
client is the complete `tiercel bench serve`. Prints one JSON line. Client and stub need a core each, and more for
several client processes; the line shows which of the two was at its limit.

Exit code 1 if a request failed or, with a rate, if the client was saturated or its event loop was late by more than
10 ms at 99 %.
"""

import argparse
import asyncio
import json
import resource
import socket
import subprocess
import sys
import time
from typing import Any

from tiercel.loadtest.bench import run_bench
from tiercel.loadtest.client.assignment import Progress
from tiercel.loadtest.settings import BenchSettings
from tiercel.values.clock import MonotonicClock

MAX_LAG_MS = 10.0
_EVENT = json.dumps({"id": "cmpl-" + "0" * 100, "choices": [{"index": 0, "text": " word", "finish_reason": None}]})
_TEXT = f"data: {_EVENT}\n\n".encode()
_CHUNK = f"{len(_TEXT):x}\r\n".encode() + _TEXT + b"\r\n"
_LAST = b'data: {"choices":[{"text":"","finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
_END = f"{len(_LAST):x}\r\n".encode() + _LAST + b"\r\n0\r\n\r\n"
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_MODELS = b'{"data":[{"id":"stub"}]}'


class Stub(asyncio.Protocol):
    """Streams `max_tokens` chunks at the given rate."""

    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, mark, body = self._received.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
        if not mark or len(body) < length:
            return
        self._received = body[length:]
        assert self._transport is not None
        if head.startswith(b"POST") and b"/tokenize" not in head:
            fields = json.loads(body[:length])
            if fields["stream"]:
                self._transport.write(_HEAD)
                self._tick(fields["max_tokens"], asyncio.get_running_loop().time())
                return
        found = b"200 OK" if b"/v1/" in head else b"404 Not Found"
        self._transport.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (found, len(_MODELS), _MODELS))

    def _tick(self, left: int, due_s: float) -> None:
        """Send the chunks one by one, each as a packet of its own, at their times."""
        assert self._transport is not None
        if self._transport.is_closing():
            return
        if left == 0:
            self._transport.write(_END)
            return
        self._transport.write(_CHUNK)
        due_s += self._gap_s
        asyncio.get_running_loop().call_at(due_s, self._tick, left - 1, due_s)


async def serve(port: int, gap_s: float) -> None:
    """Serve until the process is killed."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Stub(gap_s), "127.0.0.1", port, reuse_port=True, backlog=2048)
    await server.serve_forever()


class Silent:
    """An observer that shows nothing."""

    def stage(self, text: str, requests: int) -> None:
        """Ignore the stage."""

    def progress(self, progress: Progress) -> None:
        """Ignore the progress."""


def measure(arguments: argparse.Namespace) -> dict[str, Any]:  # Any: JSON
    """Run the load test once and return its figures."""
    streams = arguments.streams
    gap_s = streams / arguments.chunks_per_s if arguments.chunks_per_s else 0.0
    chunks = round(arguments.seconds / gap_s) if gap_s else arguments.chunks
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    stubs = [
        subprocess.Popen([sys.executable, __file__, "--stub", str(port), "--gap", str(gap_s)])
        for _ in range(arguments.stub_processes)
    ]
    try:
        time.sleep(1)
        settings = BenchSettings(
            port=port,
            num_prompts=streams,
            max_concurrency=streams,
            random_input_len=8,
            random_output_len=chunks,
            client_processes=arguments.client_processes,
            num_warmups=0,
        )
        result = asyncio.run(run_bench(settings, [], None, MonotonicClock(), "", Silent()))
    finally:
        for stub in stubs:
            stub.terminate()
            stub.wait()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    client = result.client
    stub_cpu_s = used.ru_utime + used.ru_stime - client.cpu_s
    return {
        "asked_chunks_per_s": arguments.chunks_per_s or "all",
        "chunks_per_s": round(client.chunks_per_s),
        "client_processes": client.processes,
        "client_cores": round(client.cpu_s / result.duration, 3),
        "client_us_per_chunk": round(1e6 * client.cpu_s / client.chunks, 1),
        "busiest_share": round(client.busiest_share, 3),
        "lag_p99_ms": round(client.lag_p99_ms, 2),
        "saturated": client.reason or False,
        "stub_cores": round(stub_cpu_s / result.duration, 2),
        "failed": result.failed,
        "seconds": round(result.duration, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks-per-s", type=float, default=0, help="of all streams together; 0: no limit")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10, help="how long a stream lasts, with a rate")
    parser.add_argument("--chunks", type=int, default=1000, help="of a stream, without a rate")
    parser.add_argument("--client-processes", default="auto")
    parser.add_argument("--stub-processes", type=int, default=1)
    parser.add_argument("--stub", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--gap", type=float, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stub:
        asyncio.run(serve(arguments.stub, arguments.gap))
        return 0
    figures = measure(arguments)
    print(json.dumps(figures))
    is_slow = bool(arguments.chunks_per_s) and (bool(figures["saturated"]) or figures["lag_p99_ms"] > MAX_LAG_MS)
    return int(bool(figures["failed"]) or is_slow)


if __name__ == "__main__":
    sys.exit(main())
