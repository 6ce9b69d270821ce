"""Batches of the real daemon: killed in the middle, taken over, drained, and `tiercel run-batch`."""

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.daemon import TIERCEL, Daemon, daemon
from tests.seeds import fast_and_slow

TEXT = "/v1/completions"
OVER = ("completed", "failed", "expired", "cancelled")


def lines(count: int, tokens: int = 16) -> bytes:
    bodies = [{"prompt": f"Number {number}:", "max_tokens": tokens, "temperature": 0} for number in range(count)]
    return b"".join(
        json.dumps({"custom_id": f"id-{number}", "method": "POST", "url": TEXT, "body": body}).encode() + b"\n"
        for number, body in enumerate(bodies)
    )


def begin(http: httpx.Client, data: bytes) -> str:
    file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", data)}).raise_for_status()
    body = {"input_file_id": file.json()["id"], "endpoint": TEXT, "completion_window": "24h"}
    return http.post("/v1/batches", json=body).raise_for_status().json()["id"]


def show(http: httpx.Client, batch_id: str) -> dict[str, Any]:
    """Return a batch; wait while another process has the folder."""
    end_s = time.monotonic() + 20
    while (answer := http.get(f"/v1/batches/{batch_id}")).status_code == 503 and time.monotonic() < end_s:
        time.sleep(0.05)
    return answer.raise_for_status().json()


def until_done(http: httpx.Client, batch_id: str, count: int) -> dict[str, Any]:
    """Wait until so many lines are answered, or the batch is over."""
    end_s = time.monotonic() + 90
    while (batch := show(http, batch_id))["request_counts"]["completed"] < count and batch["status"] not in OVER:
        assert time.monotonic() < end_s, batch
        time.sleep(0.02)
    return batch


def until_over(http: httpx.Client, batch_id: str) -> dict[str, Any]:
    end_s = time.monotonic() + 90
    while (batch := show(http, batch_id))["status"] not in OVER:
        assert time.monotonic() < end_s, batch
        time.sleep(0.05)
    return batch


def answers(http: httpx.Client, batch: dict[str, Any]) -> dict[str, str]:
    """Return the answers by custom id; each is there once, and there are no errors."""
    assert (batch["status"], batch["error_file_id"]) == ("completed", None), batch
    text = http.get(f"/v1/files/{batch['output_file_id']}/content").raise_for_status().text
    found = [json.loads(one) for one in text.splitlines()]
    by_id = {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in found}
    assert len(by_id) == len(found) == batch["request_counts"]["total"] == batch["request_counts"]["completed"]
    return by_id


def flags(tmp_path: Path) -> tuple[str, ...]:
    return ("--files-path", str(tmp_path / "files"), "--threads", "1")


def direct_answers(running: Daemon, count: int) -> dict[str, str]:
    texts = [running.complete(f"Number {number}:", max_tokens=16).json() for number in range(count)]
    return {f"id-{number}": text["choices"][0]["text"] for number, text in enumerate(texts)}


@pytest.mark.slow
def test_a_batch_goes_on_after_the_daemon_was_killed_and_answers_each_line_once(tmp_path: Path) -> None:
    count = 60
    with daemon(tmp_path, *flags(tmp_path)) as running:
        batch_id = begin(running.http, lines(count))
        before = until_done(running.http, batch_id, 10)
        running.kill_all()
    assert before["status"] == "in_progress"
    with daemon(tmp_path, *flags(tmp_path)) as running:
        found = answers(running.http, until_over(running.http, batch_id))
        assert set(found) == {f"id-{number}" for number in range(count)}
        assert running.metric("tiercel_batch_lines_total") <= count - before["request_counts"]["completed"]
        few = direct_answers(running, 5)
        assert {name: found[name] for name in few} == few


@pytest.mark.slow
def test_a_batch_survives_the_death_of_the_engine(tmp_path: Path) -> None:
    with daemon(tmp_path, *flags(tmp_path)) as running:
        batch_id = begin(running.http, lines(30))
        until_done(running.http, batch_id, 5)
        subprocess.run(["kill", "-9", str(running.engine_pid())], check=True)
        assert len(answers(running.http, until_over(running.http, batch_id))) == 30
        running.assert_nothing_held()


@pytest.mark.slow
def test_a_drain_leaves_the_batch_for_the_next_start(tmp_path: Path) -> None:
    with daemon(tmp_path, *flags(tmp_path)) as running:
        batch_id = begin(running.http, lines(60))
        until_done(running.http, batch_id, 5)
        assert running.stop(signal.SIGTERM) == 0
    with daemon(tmp_path, *flags(tmp_path)) as running:
        assert len(answers(running.http, until_over(running.http, batch_id))) == 60


@pytest.mark.slow
def test_a_daemon_that_takes_over_goes_on_with_the_batch(tmp_path: Path) -> None:
    with daemon(tmp_path, *flags(tmp_path)) as old:
        batch_id = begin(old.http, lines(100))
        until_done(old.http, batch_id, 5)
        port = old.url.rpartition(":")[2]
        with daemon(tmp_path, *flags(tmp_path), "--takeover", "--port", port) as new:
            assert old.process.wait(60) == 0
            assert len(answers(new.http, until_over(new.http, batch_id))) == 100


def test_a_folder_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command = [TIERCEL, "serve", "--port", "0", "--files-path", str(tmp_path / "file")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 2 and "--files-path" in ran.stderr


@pytest.mark.parametrize("has_url", fast_and_slow([True], [False]))
@pytest.mark.slow
def test_run_batch_answers_every_line(tmp_path: Path, has_url: bool) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(lines(12) + b"{\n" + lines(1))
    words = [TIERCEL, "run-batch", "-i", str(source), "-o", str(target), "--max-concurrency", "4"]

    def run(*more: str) -> None:
        ran = subprocess.run([*words, *more], capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path)
        assert ran.returncode == 1, ran.stderr  # two lines are wrong
        found = [json.loads(one) for one in target.read_text().splitlines()]
        good = [one for one in found if one["error"] is None]
        assert sorted(one["custom_id"] for one in good) == sorted(f"id-{number}" for number in range(12))
        assert all(one["response"]["status_code"] == 200 for one in good)
        bad = {one["error"]["code"]: one["custom_id"] for one in found if one["error"] is not None}
        assert bad == {"invalid_json_line": None, "duplicate_custom_id": "id-0"}
        assert "12 lines answered, 2 failed" in ran.stderr
        source.write_bytes(lines(2))
        ran = subprocess.run([*words, *more], capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr

    if has_url:
        with daemon(tmp_path) as running:
            run("--url", running.url)
    else:
        run("--calibration-seconds", "0")
