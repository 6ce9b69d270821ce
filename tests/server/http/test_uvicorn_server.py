"""The HTTP server as the daemon sets it up."""

import socket
import ssl
import sys
from pathlib import Path

import pytest

from tests.docker.test_healthcheck import CERTIFICATE
from tests.server.test_launch import FAKE, started

LIMIT_S = 10.0  # far below the 60 s of asyncio


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00"], ids=["silent", "the first bytes of a hello"])
def test_a_tls_handshake_that_does_not_end_in_time_is_closed(model_folder: Path, sent: bytes) -> None:
    fields = {"ssl_certfile": str(CERTIFICATE), "timeout_headers_s": 0.5}
    with started(model_folder, None, (sys.executable, str(FAKE)), **fields) as server:
        assert server.process.stdout is not None
        url = server.process.stdout.readline().strip()
        assert "https://127.0.0.1:" in url
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as client:
            client.sendall(sent)
            assert client.recv(1) == b""
        tls = ssl.create_default_context(cafile=CERTIFICATE)
        with (
            socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as plain,
            tls.wrap_socket(plain, server_hostname="localhost") as client,
        ):
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert client.recv(64).startswith(b"HTTP/1.1 200 ")
