"""The command `tiercel tenants` with a scripted server."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tiercel.cli.main import main

TENANT: dict[str, Any] = {
    **dict.fromkeys(("group", "requests_per_minute", "tokens_per_minute", "queue_share", "queue_timeout_s")),
    "name": "acme",
    "keys_sha256": ["7692c3ad…"],
    "weight": 2.5,
    "band": 0,
    "max_concurrency": 1000,
}


class Server(HTTPServer):
    """A server with prepared answers of /admin/tenants, which records the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, str, str, str]] = []
        self.status = 200
        self.body: object = {"version": 4, "source": "request", "tenants": [TENANT]}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        text = self.rfile.read(int(self.headers.get("content-length", 0))).decode()
        self.server.requests.append((self.command, self.path, self.headers["authorization"], text))
        body = json.dumps(self.server.body).encode()
        self.send_response(self.server.status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_PUT = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.delenv("TIERCEL_ADMIN_KEY", raising=False)
    with Server() as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_list_shows_a_table(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tenants", "list", "--url", f"{server.url}/v1", "--admin-key", "boss"]) == 0
    head, row, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["tenant", "weight", "band", "max", "seqs", "keys"]
    assert row.split() == ["acme", "2.5", "0", "1,000", "7692c3ad…"]
    assert last == "version 4, from the request"
    assert server.requests == [("GET", "/admin/tenants", "Bearer boss", "")]


def test_set_sends_the_file_with_the_key_of_the_environment(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "t.yaml"
    file.write_text("tenants: []")
    monkeypatch.setenv("TIERCEL_ADMIN_KEY", "boss")
    assert main(["tenants", "set", str(file), "--url", server.url]) == 0
    assert server.requests == [("PUT", "/admin/tenants", "Bearer boss", "tenants: []")]


def test_an_error_is_one_line(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.status, server.body = 400, {"error": {"message": "request body: tenant a: weight -1"}}
    common = ["--url", server.url, "--admin-key", "k"]
    assert main(["tenants", "list", *common]) == 1
    server.status, server.body = 404, "nothing here"
    assert main(["tenants", "list", *common]) == 1
    assert main(["tenants", "list", "--url", server.url]) == 2
    assert main(["tenants", "set", str(tmp_path / "none"), *common]) == 2
    assert main(["tenants", "list", "--url", "http://127.0.0.1:1", "--admin-key", "k"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == [
        "tiercel: error: request body: tenant a: weight -1",
        "tiercel: error: the server answered 404",
        "tiercel: error: no admin key: give --admin-key or set TIERCEL_ADMIN_KEY",
    ]
    assert "cannot be read: No such file" in lines[3]
    assert "127.0.0.1:1/admin/tenants: " in lines[4]
