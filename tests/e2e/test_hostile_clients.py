"""Requests that no HTTP library sends, to the real daemon and its event loop."""

import contextlib
import json
import socket
from pathlib import Path

import httpx
import pytest

from tests.e2e.daemon import Daemon

MIB = 1 << 20
GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
ENDLESS: dict[str, tuple[bytes, bytes]] = {
    "headers": (GET, b"X-A: " + b"a" * 60_000 + b"\r\n"),
    "a header": (GET + b"A: ", b"a" * MIB),
    "short lines": (GET, b"a:\r\n" * 100_000),
    "a request line": (b"GET /", b"a" * MIB),
    "an extension": (CHUNKED + b"1;", b"a" * MIB),
    "trailers": (CHUNKED + b"0\r\n", b"a:\r\n" * 100_000),
}


def peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def exchange(served: Daemon, begin: bytes, piece: bytes = b"", count: int = 0) -> tuple[int, dict[str, dict[str, str]]]:
    """Send a request and up to `count` pieces; return the status and the JSON of the answer."""
    url = httpx.URL(served.url)
    with socket.create_connection((url.host, url.port or 0), timeout=20) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(begin)
            for _ in range(count):
                client.sendall(piece)
        received = b""
        with contextlib.suppress(ConnectionError):
            while data := client.recv(65536):
                received += data
    head, _, body = received.partition(b"\r\n\r\n")
    assert head, "reset before the answer"
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize("name", ENDLESS)
def test_a_request_without_an_end_is_refused_and_takes_no_memory(served: Daemon, name: str) -> None:
    begin, piece = ENDLESS[name]
    before = peak_bytes(served.process.pid)
    status, answer = exchange(served, begin, piece, max(1, 20 * MIB // len(piece)))
    assert (status, answer["error"]["code"]) == (431, "headers_too_large")
    assert peak_bytes(served.process.pid) - before < 8 * MIB
    assert served.http.get("/health").status_code == 200


@pytest.mark.parametrize("upgrade", ["h2c", "websocket"])
def test_an_upgrade_is_ignored_and_the_body_is_read(served: Daemon, upgrade: str) -> None:
    body = json.dumps({"prompt": "Once", "max_tokens": 2}).encode()
    lines = f"Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: {upgrade}\r\nHTTP2-Settings: AAMAAABk\r\n".encode()
    status, answer = exchange(served, POST + lines + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    assert status == 200, answer
