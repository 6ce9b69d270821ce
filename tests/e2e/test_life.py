"""The life of the daemon: start, drain, and the death of a process."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.daemon import TIERCEL, Daemon, daemon

LONG = {"prompt": "Once", "max_tokens": 600, "ignore_eos": True, "stream": True}


def lines(running: Daemon, body: dict[str, object], heard: list[str]) -> threading.Thread:
    """Read a stream in the background."""

    def read() -> None:
        with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=60) as stream:
            heard.extend(stream.iter_lines())

    thread = threading.Thread(target=read)
    thread.start()
    while running.metric("vllm:num_requests_running") < 1:
        time.sleep(0.01)
    return thread


def text_of(heard: list[str]) -> str:
    events = [json.loads(line[6:]) for line in heard if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])


@pytest.mark.slow
def test_a_drain_lets_streams_finish_and_ends_with_zero(tmp_path: Path) -> None:
    with daemon(tmp_path) as running:
        heard: list[str] = []
        thread = lines(running, LONG, heard)
        engine = running.engine_pid()
        assert running.stop() == 0
        thread.join(20)
        assert heard[-2:] == ["data: [DONE]", ""]
        assert '"finish_reason":"length"' in "".join(heard)
        assert not Path(f"/proc/{engine}").exists()


@pytest.mark.slow
def test_a_second_signal_ends_the_drain_and_the_stream_gets_an_error(tmp_path: Path) -> None:
    with daemon(tmp_path) as running:
        heard: list[str] = []
        thread = lines(running, {**LONG, "max_tokens": 4000}, heard)
        running.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert running.process.poll() is None
        assert running.stop() == 1
        thread.join(20)
        assert '"error"' in heard[-4]
        assert heard[-2] == "data: [DONE]"


@pytest.mark.slow
def test_a_stream_goes_on_when_its_engine_is_killed(tmp_path: Path) -> None:
    with daemon(tmp_path) as running:
        undisturbed: list[str] = []
        lines(running, {**LONG, "max_tokens": 300, "seed": 7}, undisturbed).join(60)
        heard: list[str] = []
        thread = lines(running, {**LONG, "max_tokens": 300, "seed": 7}, heard)
        os.kill(running.engine_pid(), signal.SIGKILL)
        thread.join(60)
        assert heard[-2] == "data: [DONE]"
        assert text_of(heard) == text_of(undisturbed)
        assert running.metric("tiercel_engine_restarts_total") == 1
        assert running.metric("tiercel_resumed_sequences_total") == 1
        running.assert_nothing_held()
        assert running.stop() == 0


def _is_listened_at(path: Path) -> bool:
    """Whether connections arrive: a socket has a file before they do."""
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(str(path)) == 0


def test_the_server_answers_while_the_model_loads(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    transport = httpx.HTTPTransport(uds=str(path))
    with (
        daemon(tmp_path, "--uds", str(path), wait=False),
        httpx.Client(transport=transport, base_url="http://tiercel") as http,
    ):
        while not _is_listened_at(path):
            time.sleep(0.005)
        first = http.get("/ready")
        assert first.status_code == 503
        assert first.json()["error"]["message"]
        assert http.get("/health/live").status_code == 200
        assert http.get("/version").json()["version"]
        end_s = time.monotonic() + 60
        while http.get("/ready").status_code != 200:
            assert time.monotonic() < end_s
            time.sleep(0.01)
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("no/such/folder",), "no/such/folder"),
        pytest.param(("--max-model-len", "10000000"), "--max-model-len", marks=pytest.mark.slow),
        (("--kv-cache-memory-bytes", "900T"), "--kv-cache-memory-bytes"),
        (("--host", "0.0.0.0"), "0.0.0.0"),
        pytest.param(("--device", "cuda"), "cuda", marks=pytest.mark.slow),
        (("--quantization", "aqw"), "--quantization"),
    ],
)
@pytest.mark.sampled(1)
def test_a_failed_start_gives_its_reason_in_one_line(flags: tuple[str, ...], said: str, tmp_path: Path) -> None:
    command = [TIERCEL, "serve", "--port", "0", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
    complaint = [line for line in ended.stderr.splitlines() if line.strip() and not line.startswith(("{", "INFO"))]
    assert len(complaint) == 1


@pytest.mark.slow
def test_a_piped_chat_talks_to_the_daemon(tmp_path: Path) -> None:
    with daemon(tmp_path) as running:
        command = [TIERCEL, "chat", "--url", running.url]
        said = subprocess.run(command, input="Hello!\n", capture_output=True, text=True, timeout=60)
        assert said.returncode == 0, said.stderr
        assert len(said.stdout.split()) > 1
