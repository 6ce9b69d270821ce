"""`tiercel config`: the source of each value, and changes sent to a running server."""

import json
import os
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tiercel.cli.config_page import reference
from tiercel.cli.main import main
from tiercel.settings.settings import SETTINGS

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(autouse=True)
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model folder in an empty working folder, and no variable of ours set."""
    for name in os.environ:
        if name.startswith(("TIERCEL_", "VLLM_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")


def show(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["config", "show", "model", "--json", *words]) == 0
    settings: dict[str, Any] = json.loads(capsys.readouterr().out)["settings"]
    return settings


def test_each_value_is_shown_with_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("tiercel.toml").write_text('port = 9000\nmax_num_seqs = 12\nlog-level = "debug"\n')
    monkeypatch.setenv("TIERCEL_MAX_NUM_SEQS", "13")
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "7")
    shown = show(capsys, "--log-level", "error", "--no-enable-log-requests")

    def source(key: str) -> tuple[object, str, str | None]:
        return shown[key]["value"], shown[key]["source"], shown[key]["name"]

    assert source("log-level") == ("error", "flag", "--log-level")
    assert source("enable-log-requests") == (False, "flag", "--enable-log-requests")
    assert source("max-num-seqs") == (13, "env", "TIERCEL_MAX_NUM_SEQS")
    assert source("timeout-keep-alive") == (7.0, "env", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE")
    assert source("port") == (9000, "file", str(tmp_path / "tiercel.toml"))
    assert source("host") == ("127.0.0.1", "default", None)
    assert list(shown) == [option.key for option in SETTINGS.values()]
    assert {key for key, one in shown.items() if one["is_live"]} == {
        option.key for option in SETTINGS.values() if option.option.is_live
    }


def test_another_file_is_named_by_its_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "etc").mkdir()
    Path("etc/other.toml").write_text("port = 1\n")
    shown = show(capsys, "--config", "etc/other.toml", "--changed")
    assert shown["port"]["name"] == str(tmp_path / "etc" / "other.toml")
    assert set(shown) == {"model", "config", "port"}


def test_no_key_is_ever_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TIERCEL_API_KEY", "hush-one,hush-two")
    Path("tiercel.toml").write_text('admin-key = "hush-three"\n')
    for words in ((), ("--json",)):
        assert main(["config", "show", "model", *words]) == 0
        out = capsys.readouterr().out
        assert "hush" not in out
        assert "***" in out
    shown = show(capsys)
    assert (shown["api-key"]["value"], shown["admin-key"]["value"]) == (["***", "***"], "***")


def test_the_table_for_people_has_a_line_a_setting_under_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "model", "--changed", "--max-num-seqs", "7", "--served-model-name", "a"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["Model"],
        ["model", "model", "flag", "--model"],
        ["served-model-name", "a", "flag", "--served-model-name"],
        ["Scheduler"],
        ["max-num-seqs", "7", "flag", "--max-num-seqs"],
    ]


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("max-num-seq = 3\n", (), "tiercel.toml: there is no setting max-num-seq; did you mean max-num-seqs?"),
        ("port = -1\n", (), "tiercel.toml: port = -1: expected a whole number, from 0 to 65,535"),
        ("", ("--port", "x"), "--port x: expected a whole number, from 0 to 65,535"),
        ("", ("--quantization", "aqw"), "--quantization aqw: expected one of auto, int8, int4, awq"),
    ],
)
def test_options_that_serve_refuses_are_refused(
    text: str, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("tiercel.toml").write_text(text)
    assert main(["config", "show", "model", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_misspelled_variable_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TIERCEL_MAX_NUM_SEQ", "3")
    monkeypatch.setenv("TIERCEL_SOMETHING_ELSE", "3")
    assert main(["config", "show", "model"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("TIERCEL_MAX_NUM_SEQ is not a setting and is ignored; did you mean TIERCEL_MAX_NUM_SEQS?")


def test_the_page_of_the_settings_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "reference"]) == 0
    page = capsys.readouterr().out
    assert page == reference()
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert written == page, "run: tiercel config reference > docs/configuration.md"
    for name in SETTINGS:
        assert page.count(f"| `{name.replace('_', '-')}` |") == 1


def test_the_example_on_the_page_is_a_settings_file(capsys: pytest.CaptureFixture[str]) -> None:
    example = reference().split("```toml\n")[1].split("```")[0]
    Path("tiercel.toml").write_text(example)
    shown = show(capsys, "--changed")
    assert set(shown) == {"model", *tomllib.loads(example)}


# A running server


class Server(HTTPServer):
    """A server with prepared answers of /admin, which records the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, str, str, Any]] = []
        self.status = 200
        self.body: object = {
            "version": 4,
            "source": "request",
            "changed_at": "2026-01-01T00:00:00+00:00",
            "settings": {"port": {"value": 80, "source": "default", "name": None, "is_live": False}},
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        text = self.rfile.read(int(self.headers.get("content-length", 0)))
        asked = (self.command, self.path, self.headers["authorization"], json.loads(text) if text else None)
        self.server.requests.append(asked)
        body = json.dumps(self.server.body).encode()
        self.send_response(self.server.status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_PATCH = do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("TIERCEL_ADMIN_KEY", "boss")
    with Server() as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_get_shows_the_settings_in_force(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "get", "--url", f"{server.url}/v1"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["port", "80", "default"]
    assert lines[-1] == ["version", "4,", "request,", "since", "2026-01-01T00:00:00+00:00"]
    assert server.requests == [("GET", "/admin/config", "Bearer boss", None)]


def test_set_sends_values_and_drops_empty_ones(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "set", "--url", server.url, "max-num-seqs=3", "log-level="]) == 0
    assert capsys.readouterr().out == "version 4\n"
    values = {"max-num-seqs": "3", "log-level": None}
    assert server.requests == [("PATCH", "/admin/config", "Bearer boss", values)]
    assert main(["config", "set", "--url", server.url, "max-num-seqs"]) == 2
    assert len(server.requests) == 1


def test_reload_asks_for_one(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.body = {"config_version": 2, "tenants_version": 5}
    assert main(["config", "reload", "--url", server.url]) == 0
    assert capsys.readouterr().out == "settings version 2, tenants version 5\n"
    assert server.requests == [("POST", "/admin/reload", "Bearer boss", None)]


def test_a_refusal_is_one_line_and_1(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.status, server.body = 409, {"error": {"message": "port = 9: needs a restart"}}
    for words in (["set", "port=9"], ["reload"], ["get"]):
        assert main(["config", words[0], "--url", server.url, *words[1:]]) == 1
        assert capsys.readouterr().err == "tiercel: error: port = 9: needs a restart\n"


def test_without_an_admin_key_no_request_is_sent(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TIERCEL_ADMIN_KEY")
    assert main(["config", "get", "--url", server.url]) == 2
    assert "TIERCEL_ADMIN_KEY" in capsys.readouterr().err
    assert not server.requests
