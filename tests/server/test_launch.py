"""The server process from start to end, with a fake engine process."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.server.harness import text_body

FAKE = Path(__file__).with_name("fake_engine.py")
START = """
import json, sys
from tiercel.server.launch import serve
from tiercel.settings.settings import EngineSettings, ServerSettings, Settings
fields = json.loads(sys.argv[1])
server = ServerSettings(served_model_names=("tiny",), port=0, **fields)
sys.exit(serve(Settings(engine=EngineSettings(model=fields["model"]), server=server), command=json.loads(sys.argv[2])))
"""

CLI = "import sys; from tiercel.cli.main import main; sys.exit(main())"


@dataclass
class Started:
    """A server process; `url` is set once it has announced its address."""

    process: "subprocess.Popen[str]"
    url: str = ""

    def wait(self, limit_s: float = 15) -> tuple[int, str]:
        """Wait for the end; return exit code and stderr."""
        _, err = self.process.communicate(timeout=limit_s)
        return self.process.returncode, err

    def await_url(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.url = line.strip().rsplit(" ", 1)[-1]
        assert self.url.startswith("http://127.0.0.1:"), line
        assert "curl" in self.process.stdout.readline()


@contextmanager
def started(
    model_folder: Path,
    fake: dict[str, str] | None = None,
    command: tuple[str, ...] = (sys.executable, str(FAKE)),
    **fields: object,
) -> Iterator[Started]:
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            START,
            json.dumps({"model": str(model_folder), **fields}),
            json.dumps(command),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(fake or {})},
    )
    try:
        yield Started(process)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("redirection", [">/dev/full 2>&1", ">&- 2>&- <&-"])
@pytest.mark.sampled(1)
def test_a_daemon_serves_though_nobody_can_read_what_it_says(model_folder: Path, redirection: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    fields = json.dumps({"model": str(model_folder)})
    start = START.replace("port=0", f"port={port}")
    arguments = [sys.executable, "-c", start, fields, json.dumps((sys.executable, str(FAKE)))]
    process = subprocess.Popen(["sh", "-c", f'exec "$@" {redirection}', "sh", *arguments])
    try:
        assert _answers(f"http://127.0.0.1:{port}", process)
        process.terminate()
        assert process.wait(15) == 0
    finally:
        process.kill()
        process.wait()


def _answers(url: str, process: "subprocess.Popen[bytes]") -> bool:
    """Wait until a daemon is ready; return whether it answers a completion."""
    while process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/ready").status_code == 200:
                return httpx.post(f"{url}/v1/completions", json=text_body(max_tokens=1)).status_code == 200
        time.sleep(0.05)
    return False


class Reader(threading.Thread):
    """A client that reads a stream in the background."""

    def __init__(self, url: str, tokens: int) -> None:
        super().__init__(daemon=True)
        self.url, self.tokens, self.lines = url, tokens, list[str]()
        self.has_begun = threading.Event()

    def run(self) -> None:
        body = text_body(stream=True, max_tokens=self.tokens)
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=30) as answer,
        ):
            for line in answer.iter_lines():
                if line:
                    self.lines.append(line)
                    self.has_begun.set()

    @staticmethod
    def reading(url: str, tokens: int) -> "Reader":
        """Return a reader that has received its first event."""
        reader = Reader(url, tokens)
        reader.start()
        assert reader.has_begun.wait(10)
        return reader

    def rest(self) -> list[str]:
        """Wait for the end of the stream; return all of it."""
        self.join(60)
        assert not self.is_alive()
        return self.lines


def _until_unready(url: str) -> None:
    deadline = time.monotonic() + 5
    while httpx.get(f"{url}/ready").status_code != 503:
        assert time.monotonic() < deadline


def _engine_pid(err: str) -> int:
    return next(json.loads(line)["pid"] for line in err.splitlines() if '"engine_started"' in line)


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.sampled(1)
def test_an_idle_server_exits_with_0_and_ends_its_engine(model_folder: Path, number: signal.Signals) -> None:
    with started(model_folder) as server:
        server.await_url()
        assert httpx.get(f"{server.url}/ready").status_code == 200
        server.process.send_signal(number)
        code, err = server.wait()
        assert code == 0
        assert _is_gone(_engine_pid(err))


@pytest.mark.slow
def test_ctrl_c_while_the_engine_loads_is_no_death_of_an_engine(model_folder: Path) -> None:
    with started(model_folder, {"FAKE_LOAD_S": "3600"}) as server:
        assert server.process.stderr is not None
        first = server.process.stderr.readline()
        while "engine_started" not in first:
            first = server.process.stderr.readline()
        server.process.send_signal(signal.SIGINT)
        code, err = server.wait(60)
        assert code == 0
        assert "engine_died" not in err and '"error"' not in err


@pytest.mark.slow
def test_a_slow_reader_is_logged_in_json_only(model_folder: Path) -> None:
    with started(model_folder, {"FAKE_CONTEXT": "100000"}) as server:
        server.await_url()
        body = json.dumps(text_body(stream=True, max_tokens=90_000, logprobs=20)).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}"
        )
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[-1])))
            slow.sendall(head.encode() + b"\r\n\r\n" + body)
            deadline = time.monotonic() + 60
            while 'finished_reason="abort",model_name="tiny"} 1\n' not in httpx.get(f"{server.url}/metrics").text:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        server.process.send_signal(signal.SIGTERM)
        code, err = server.wait()
        assert code == 0
        lines = [json.loads(line) for line in err.splitlines()]
        assert [line["finish_reason"] for line in lines if line["event"] == "request_done"] == ["slow_reader"]
        assert "ASGI" not in err


def test_the_objects_of_the_start_are_exempt_from_garbage_collection(model_folder: Path) -> None:
    script = START.replace("sys.exit(serve(", "code = serve(").replace("(sys.argv[2])))", "(sys.argv[2]))")
    script += "import gc\nassert gc.get_freeze_count() > 10_000 and gc.get_threshold()[0] > 10_000\nsys.exit(code)"
    arguments = [json.dumps({"model": str(model_folder)}), json.dumps([sys.executable, str(FAKE)])]
    run = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True, text=True, timeout=20, env={**os.environ, "FAKE_FAILURE": "enough"},
    )  # fmt: skip
    assert (run.returncode, "Traceback" in run.stderr) == (2, False), run.stderr


def test_a_drain_finishes_streams_and_refuses_new_requests(model_folder: Path) -> None:
    with started(model_folder, {"FAKE_STEP_S": "0.05"}) as server:
        server.await_url()
        reader = Reader.reading(server.url, 60)
        server.process.send_signal(signal.SIGTERM)
        _until_unready(server.url)
        refused = httpx.post(f"{server.url}/v1/completions", json=text_body())
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert int(refused.headers["retry-after"]) > 0
        assert refused.headers["connection"] == "close"
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert httpx.get(f"{server.url}/health/live").status_code == 200
        assert server.wait()[0] == 0
        assert '"finish_reason":"length"' in reader.rest()[-2]
        assert reader.lines[-1] == "data: [DONE]"


@pytest.mark.slow
def test_a_drain_that_takes_too_long_ends_streams_with_an_error_event(model_folder: Path) -> None:
    with started(model_folder, {"FAKE_STEP_S": "0.05"}, shutdown_timeout_s=0.5) as server:
        server.await_url()
        reader = Reader.reading(server.url, 200)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait()[0] == 0
        assert '"code":"shutting_down"' in reader.rest()[-2]
        assert reader.lines[-1] == "data: [DONE]"


@pytest.mark.slow
def test_a_second_signal_ends_the_drain_at_once(model_folder: Path) -> None:
    with started(model_folder, {"FAKE_STEP_S": "0.05"}) as server:
        server.await_url()
        Reader.reading(server.url, 200)
        server.process.send_signal(signal.SIGTERM)
        _until_unready(server.url)
        asked_s = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        code, err = server.wait()
        assert time.monotonic() - asked_s < 3
        assert code == 1
        assert _is_gone(_engine_pid(err))


@pytest.mark.slow
def test_a_signal_while_the_model_loads_ends_the_start(model_folder: Path) -> None:
    with started(model_folder, {"FAKE_LOAD_S": "30"}) as server:
        assert server.process.stderr is not None
        pid = json.loads(server.process.stderr.readline())["pid"]
        server.process.send_signal(signal.SIGTERM)
        code, _ = server.wait(10)
        assert code == 0
        assert _is_gone(pid)


def test_an_engine_that_cannot_start_gives_one_line_and_exit_code_2(model_folder: Path) -> None:
    with started(model_folder, {"FAKE_FAILURE": "weights of the model are missing"}) as server:
        code, err = server.wait()
        assert code == 2
        assert "tiercel: weights of the model are missing" in err.splitlines()
        assert "Traceback" not in err


def _text_of(lines: list[str]) -> str:
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])


def test_a_stream_survives_the_death_of_its_engine(model_folder: Path) -> None:
    fake = {"FAKE_STEP_S": "0.01", "FAKE_REPLY": " ".join(map(str, range(40, 60)))}
    with started(model_folder, fake) as server:
        server.await_url()
        undisturbed = Reader.reading(server.url, 100).rest()
    with started(model_folder, {**fake, "FAKE_DIE_AT": "40"}) as server:
        server.await_url()
        lines = Reader.reading(server.url, 100).rest()
        assert lines[-1] == "data: [DONE]"
        assert _text_of(lines) == _text_of(undisturbed)
        server.process.send_signal(signal.SIGTERM)
        code, err = server.wait()
        assert code == 0
        deaths = [json.loads(line) for line in err.splitlines() if '"engine_died"' in line]
        assert [death["cause"] for death in deaths] == ["exit code 9"] * 2
        assert "Traceback" not in err


def test_the_request_that_kills_engines_is_failed_and_no_other(model_folder: Path) -> None:
    with started(model_folder, {"FAKE_STEP_S": "0.02", "FAKE_POISON": "77"}) as server:
        server.await_url()
        others = [Reader.reading(server.url, 150) for _ in range(3)]
        poison = httpx.post(f"{server.url}/v1/completions", json=text_body([5, 77]), timeout=30)
        assert (poison.status_code, poison.json()["error"]["code"]) == (500, "engine_crashed")
        for other in others:
            lines = other.rest()
            assert lines[-1] == "data: [DONE]"
            assert '"finish_reason":"length"' in "".join(lines)
        page = httpx.get(f"{server.url}/metrics").text
        assert 'tiercel_engine_restarts_total{reason="exit"} 2.0' in page
        assert 'tiercel_stream_errors_total{reason="engine_crashed"} 1.0' in page


@pytest.mark.slow
def test_a_request_that_arrives_while_the_engine_is_restarted_is_served(model_folder: Path) -> None:
    with started(model_folder, {"FAKE_LOAD_S": "1"}) as server:
        server.await_url()
        assert server.process.stderr is not None
        os.kill(json.loads(server.process.stderr.readline())["pid"], signal.SIGKILL)
        _until_unready(server.url)
        assert httpx.get(f"{server.url}/ready").json()["status"] == "restarting"
        assert httpx.get(f"{server.url}/health/live").status_code == 200
        assert httpx.post(f"{server.url}/v1/completions", json=text_body(), timeout=30).status_code == 200


@pytest.mark.slow
def test_an_engine_that_cannot_be_started_for_a_moment_is_tried_again(model_folder: Path, tmp_path: Path) -> None:
    engine, away = tmp_path / "engine", tmp_path / "away"
    engine.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    engine.chmod(0o700)
    with started(model_folder, command=(str(engine),)) as server:
        server.await_url()
        assert server.process.stderr is not None
        pid = json.loads(server.process.stderr.readline())["pid"]
        engine.rename(away)
        os.kill(pid, signal.SIGKILL)
        while '"engine_not_started"' not in (line := server.process.stderr.readline()):
            assert line
        away.rename(engine)
        assert httpx.post(f"{server.url}/v1/completions", json=text_body(), timeout=30).status_code == 200


@pytest.mark.slow
def test_an_engine_that_is_killed_again_and_again_ends_the_daemon_with_3(model_folder: Path) -> None:
    with started(model_folder) as server:
        server.await_url()
        assert server.process.stderr is not None
        for _ in range(3):
            while '"engine_started"' not in (line := server.process.stderr.readline()):
                assert line
            os.kill(json.loads(line)["pid"], signal.SIGKILL)
        code, err = server.wait()
        assert code == 3
        assert "tiercel: the engine died 3 times within 60 s, last: killed by SIGKILL" in err.splitlines()


@pytest.mark.slow
def test_an_engine_that_exits_while_it_loads_for_the_first_time_ends_the_daemon_at_once(model_folder: Path) -> None:
    with started(model_folder, {"FAKE_STEP_S": "not a number"}) as server:
        code, err = server.wait()
        assert code == 3
        assert "tiercel: the engine died at its start (starting): exit code 1" in err.splitlines()


@pytest.mark.slow
def test_a_killed_server_leaves_no_engine_behind(model_folder: Path) -> None:
    with started(model_folder) as server:
        server.await_url()
        assert server.process.stderr is not None
        pid = json.loads(server.process.stderr.readline())["pid"]
        server.process.kill()
        server.process.wait()
        deadline = time.monotonic() + 10
        while not _is_gone(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert _is_gone(pid)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"host": "0.0.0.0"}, "--host 0.0.0.0 can be reached from other machines"),
        ({"model": "/nonexistent"}, "tokenizer.json is missing"),
        ({"chat_template": "{% broken"}, "the chat template does not compile"),
        ({"override_generation_config": {"heat": 1.0}}, "unknown key 'heat'"),
    ],
)
@pytest.mark.sampled(1)
def test_wrong_settings_give_one_line_and_exit_code_2(
    model_folder: Path, fields: dict[str, object], words: str
) -> None:
    with started(model_folder, None, **{"model": str(model_folder), **fields}) as server:
        code, err = server.wait()
        assert code == 2
        assert words in err
        assert len(err.splitlines()) == 1


@pytest.mark.slow
def test_a_key_or_an_explicit_flag_allows_other_hosts(model_folder: Path) -> None:
    with started(model_folder, None, host="0.0.0.0", api_keys=["secret"]) as server:
        server.await_url()
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        server.process.send_signal(signal.SIGTERM)
        assert server.wait()[0] == 0


def test_a_port_in_use_gives_one_line_and_exit_code_2(model_folder: Path) -> None:
    with started(model_folder) as first:
        first.await_url()
        port = int(first.url.rsplit(":", 1)[-1])
        script = START.replace("port=0", f"port={port}")
        arguments = [json.dumps({"model": str(model_folder)}), "[]"]
        second = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=15)
        assert second.returncode == 2
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use; the process {first.process.pid} (" in (
            second.stderr
        )
        assert "listens there: choose another --port" in second.stderr


@pytest.mark.slow
def test_a_unix_socket_is_served_and_a_stale_one_replaced(model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiercel.sock"
    for _ in range(2):
        with started(model_folder, None, uds=str(path)) as server:
            assert server.process.stdout is not None
            assert str(path) in server.process.stdout.readline()
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
                assert client.get("http://localhost/ready").status_code == 200
            server.process.kill()
            server.process.wait()


def test_no_text_and_no_key_is_logged(model_folder: Path) -> None:
    with started(model_folder, None, api_keys=["sk-secret-key"]) as server:
        server.await_url()
        headers = {"authorization": "Bearer sk-secret-key"}
        answer = httpx.post(f"{server.url}/v1/completions", json=text_body("private words"), headers=headers)
        assert answer.status_code == 200
        server.process.send_signal(signal.SIGTERM)
        _, err = server.wait()
        assert "private" not in err
        assert "sk-secret" not in err
        done = next(json.loads(line) for line in err.splitlines() if "request_done" in line)
        assert done["status"] == 200
        assert done["finish_reason"] == "length"
        assert done["output_tokens"] == 16
        assert {"request_id", "prompt_tokens", "cached_tokens", "queue_ms", "ttft_ms", "itl_p50_ms"} <= set(done)


def _eventually(url: str, path: str, key: str, status: int) -> None:
    deadline = time.monotonic() + 10
    while httpx.get(f"{url}{path}", headers={"authorization": f"Bearer {key}"}).status_code != status:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_sighup_reloads_the_tenants_and_a_bad_file_changes_nothing(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: [{name: acme, key: one}]")
    with started(model_folder, None, tenants_config=str(file)) as server:
        server.await_url()
        _eventually(server.url, "/v1/models", "one", 200)
        file.write_text("tenants: [{name: acme, key: two}]")
        server.process.send_signal(signal.SIGHUP)
        _eventually(server.url, "/v1/models", "two", 200)
        _eventually(server.url, "/v1/models", "one", 401)
        file.write_text("tenants: [{name: acme, key: three, weight: heavy}]")
        server.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 10
        while "tiercel_tenants_config_errors_total 1\n" not in (text := httpx.get(f"{server.url}/metrics").text):
            assert time.monotonic() < deadline
        assert "tiercel_tenants_config_version 2\n" in text
        assert httpx.get(f"{server.url}/ready").status_code == 200
        _eventually(server.url, "/v1/models", "two", 200)
        file.unlink()
        for _ in range(50):
            server.process.send_signal(signal.SIGHUP)
        _eventually(server.url, "/v1/models", "two", 200)
        server.process.send_signal(signal.SIGTERM)
        code, err = server.wait()
        assert code == 0
        lines = [json.loads(line) for line in err.splitlines()]
        refused = [line["reason"] for line in lines if line["event"] == "tenants_refused"]
        assert refused[0] == f"{file}: tenant acme: weight heavy: expected a number from 0.01 to 1000"
        assert "cannot be read: No such file" in refused[-1]


@pytest.mark.slow
def test_sighup_without_a_tenants_file_changes_nothing(model_folder: Path) -> None:
    with started(model_folder) as server:
        server.await_url()
        server.process.send_signal(signal.SIGHUP)
        assert httpx.get(f"{server.url}/ready").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        code, err = server.wait()
        assert (code, "config_unchanged" in err) == (0, True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tenants: [{name: acme, key: one, weight: 5000}]", "tenant acme: weight 5000: expected a number from 0.01 to"),
        ("tenants: [", "not YAML: line "),
        (None, "cannot be read: No such file or directory"),
    ],
)
@pytest.mark.sampled(1)
def test_a_wrong_tenants_file_at_the_start_gives_one_line_and_exit_code_2(
    text: str | None, words: str, model_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "tenants.yaml"
    if text is not None:
        file.write_text(text)
    with started(model_folder, None, tenants_config=str(file)) as server:
        code, err = server.wait()
        assert (code, len(err.splitlines())) == (2, 1)
        assert err.startswith(f"tiercel: {file}: ")
        assert words in err


@pytest.mark.slow
def test_a_tenants_file_allows_other_hosts(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: [{name: acme, key: one}]")
    with started(model_folder, None, host="0.0.0.0", tenants_config=str(file)) as server:
        server.await_url()
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        server.process.send_signal(signal.SIGTERM)
        assert server.wait()[0] == 0


def test_the_http_process_never_loads_torch(model_folder: Path) -> None:
    script = "import sys, tiercel.server.launch\nassert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=30)


def _statuses(http: httpx.Client) -> dict[str, int]:
    paths = ("/admin/config", "/metrics", "/ui", "/ui/data", "/health", "/v1/models")
    return {path: http.get(path, headers={"authorization": "Bearer boss"}).status_code for path in paths}


@pytest.mark.slow
def test_the_operators_routes_move_to_the_second_port(model_folder: Path) -> None:
    with started(model_folder, admin_port=0, admin_key="boss") as server:
        server.await_url()
        assert server.process.stdout is not None
        server.process.stdout.readline()
        line = server.process.stdout.readline().split()
        assert line[:-1] == ["/admin,", "/metrics", "and", "/ui:"]
        assert server.process.stdout.readline().strip() == f"dashboard: {line[-1]}/ui"
        with httpx.Client(base_url=server.url) as http:
            hidden = dict.fromkeys(("/admin/config", "/metrics", "/ui", "/ui/data"), 404)
            assert _statuses(http) == {**hidden, "/health": 200, "/v1/models": 200}
            assert http.get("/metrics").text.replace("/metrics", "/absent") == http.get("/absent").text
        with httpx.Client(base_url=line[-1]) as http:
            assert set(_statuses(http).values()) == {200}
            assert http.get("/metrics", headers={"host": "evil.example"}).status_code == 421
        server.process.send_signal(signal.SIGTERM)
        assert server.wait()[0] == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(line[-1])


@pytest.mark.slow
def test_the_operators_routes_move_to_a_unix_socket(model_folder: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "admin.sock")
    with started(model_folder, admin_uds=path, admin_key="boss") as server:
        server.await_url()
        assert httpx.get(f"{server.url}/metrics").status_code == 404
        with httpx.Client(base_url="http://tiercel", transport=httpx.HTTPTransport(uds=path)) as http:
            assert set(_statuses(http).values()) == {200}
        shown = subprocess.run(
            [sys.executable, "-c", CLI, "config", "get", "--url", f"unix:{path}", "--admin-key", "boss"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (shown.returncode, shown.stdout[:9]) == (0, "version 1"), shown
