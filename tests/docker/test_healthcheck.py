"""docker/healthcheck.py against servers that are ready, loading and absent."""

import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.docker.reading import DOCKER

PROBE = DOCKER / "healthcheck.py"


class _Reply(http.server.BaseHTTPRequestHandler):
    """A server that is ready on /ready and not yet on anything else."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/ready" else 503)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


class _Loading(_Reply):
    path = ""

    def do_GET(self) -> None:
        self.path = "/loading"
        super().do_GET()


@pytest.fixture(params=[_Reply, _Loading])
def answering(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """A port, and the exit code that the probe owes it."""
    with http.server.HTTPServer(("127.0.0.1", 0), request.param) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port, 0 if request.param is _Reply else 1
        server.shutdown()
        thread.join()


def _probe(port: int) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "TIERCEL_PORT": str(port), "http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
    return subprocess.run(
        [sys.executable, "-S", str(PROBE)], env=environment, capture_output=True, text=True, check=False, timeout=30
    )


def test_the_probe_tells_a_ready_server_from_a_loading_one(answering: tuple[int, int]) -> None:
    port, code = answering
    ran = _probe(port)
    assert (ran.returncode, ran.stdout, ran.stderr) == (code, "{}\n", "")


def test_the_probe_fails_in_one_line_where_nobody_listens() -> None:
    ran = _probe(1)
    assert ran.returncode == 1
    assert ran.stdout.count("\n") == 1
    assert ran.stderr == ""
