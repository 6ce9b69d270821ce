"""docker/healthcheck.py against servers that are ready, loading and absent."""

import http.server
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.docker.reading import DOCKER

PROBE = DOCKER / "healthcheck.py"
CERTIFICATE = Path(__file__).with_name("loopback.pem")  # certificate and key for these tests only, valid until 2126


class _Reply(http.server.BaseHTTPRequestHandler):
    """A server that answers 200 at /ready and 503 elsewhere."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/ready" else 503)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


class _Babble(_Reply):
    """A server that does not speak HTTP, like one with TLS."""

    def do_GET(self) -> None:
        self.wfile.write(b"babble\r\n")


class _Loading(_Reply):
    path = ""

    def do_GET(self) -> None:
        self.path = "/loading"
        super().do_GET()


@contextmanager
def _served(reply: type[_Reply], certificate: Path | None = None) -> Iterator[int]:
    with http.server.HTTPServer(("127.0.0.1", 0), reply) as server:
        if certificate is not None:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(certificate)
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.fixture(params=[_Reply, _Loading])
def answering(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """Yield a port and the expected exit code of the probe."""
    with _served(request.param) as port:
        yield port, 0 if request.param is _Reply else 1


def _probe(port: int, **names: str) -> "subprocess.CompletedProcess[str]":
    names = names or {"TIERCEL_PORT": str(port)}
    environment = {**os.environ, **names, "http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
    return subprocess.run(
        [sys.executable, "-S", str(PROBE)], env=environment, capture_output=True, text=True, check=False, timeout=30
    )


def test_the_probe_distinguishes_a_ready_from_a_loading_server(answering: tuple[int, int]) -> None:
    port, code = answering
    ran = _probe(port)
    assert (ran.returncode, ran.stdout, ran.stderr) == (code, "{}\n", "")


def test_the_probe_fails_in_one_line_at_a_closed_port() -> None:
    ran = _probe(1)
    assert ran.returncode == 1
    assert ran.stdout.count("\n") == 1
    assert ran.stderr == ""


@pytest.mark.parametrize("own", ["", "tcp://10.0.0.1:80"])
def test_the_probe_uses_the_port_of_the_server(own: str) -> None:
    with _served(_Reply) as port:
        assert _probe(port, TIERCEL_PORT=own, VLLM_PORT=str(port)).returncode == 0
        assert _probe(port, TIERCEL_PORT="1", VLLM_PORT=str(port)).returncode == 1


def test_the_probe_fails_in_one_line_where_no_http_is_spoken() -> None:
    with _served(_Babble) as port:
        ran = _probe(port)
    assert (ran.returncode, ran.stdout.count("\n"), ran.stderr) == (1, 1, "")


@pytest.mark.parametrize("name", ["TIERCEL_SSL_CERTFILE", "VLLM_SSL_CERTFILE"])
@pytest.mark.parametrize("reply", [_Reply, _Loading])
def test_the_probe_speaks_tls_where_the_server_does(name: str, reply: type[_Reply]) -> None:
    with _served(reply, CERTIFICATE) as port:
        ran = _probe(port, TIERCEL_PORT=str(port), **{name: str(CERTIFICATE)})
    assert (ran.returncode, ran.stdout, ran.stderr) == (int(reply is _Loading), "{}\n", "")
