"""Rows 12 to 16 and 21: a request that the engine cannot compute, and the deaths of engine and HTTP process."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.daemon import Daemon, command_of, daemon
from tests.e2e.prompts import ONE_THREAD, PROMPTS, text
from tests.faults.crash_plan import CrashPlan
from tests.faults.faulty_engine import BAD_SEED, HOG_BYTES, HOG_SEED, POISON_SEED
from tests.faults.memory_group import memory_group
from tests.faults.streams import Ask, StreamReader, crashing_daemon, make_asks

TOKENS = (250, 300)
CLIENTS = 6


@pytest.fixture
def asks() -> list[Ask]:
    return make_asks(random.Random(13), PROMPTS[:3], CLIENTS, TOKENS)


def wait_gone(pid: int, patience_s: float) -> None:
    end_s = time.monotonic() + patience_s
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end_s, f"process {pid} lives on"
        time.sleep(0.02)


def wait_status(running: Daemon, path: str, status: int, patience_s: float = 60.0) -> None:
    end_s = time.monotonic() + patience_s
    while running.http.get(path).status_code != status:
        assert time.monotonic() < end_s, f"{path} does not answer {status}"
        time.sleep(0.02)


def differences(readers: list[StreamReader], expected: list[object]) -> list[str]:
    """Return the streams that are not as expected, each whole: a text that was wrong once may not come again."""
    got = [reader.finished().outcome for reader in readers]
    pairs = enumerate(zip(got, expected, strict=True))
    return [f"stream {number}: {one!r}\nexpected: {other!r}" for number, (one, other) in pairs if one != other]


def undisturbed(running: Daemon, asks: list[Ask]) -> list[object]:
    readers = [StreamReader(running.url, ask) for ask in asks]
    for reader in readers:
        reader.start()
    return [reader.finished().outcome for reader in readers]


def begin(running: Daemon, asks: list[Ask]) -> list[StreamReader]:
    return [StreamReader.reading(running.url, ask) for ask in asks]


def test_row_12_a_request_that_the_engine_cannot_compute_fails_alone(tmp_path: Path, asks: list[Ask]) -> None:
    with crashing_daemon(tmp_path, CrashPlan(tmp_path), *ONE_THREAD) as running:
        expected = undisturbed(running, asks)
        readers = begin(running, asks)
        bad = running.complete("This one fails.", seed=BAD_SEED, temperature=0.7)
        assert bad.status_code == 500
        assert bad.json()["error"]["code"]
        assert "injected" not in bad.text
        assert not differences(readers, expected)
        running.assert_nothing_held()


def test_row_13_streams_continue_after_the_engine_was_killed(tmp_path: Path, asks: list[Ask]) -> None:
    with daemon(tmp_path, *ONE_THREAD) as running:
        expected = undisturbed(running, asks)
        readers = begin(running, asks)
        engine = running.engine_pid()
        os.kill(engine, signal.SIGKILL)
        wait_status(running, "/ready", 503)
        assert running.http.get("/health/live").status_code == 200
        assert not differences(readers, expected)
        wait_status(running, "/ready", 200)
        assert running.engine_pid() != engine
        assert running.metric("tiercel_engine_restarts_total") == 1
        running.assert_nothing_held()
        assert running.stop() == 0


def test_row_13_a_request_that_kills_the_engine_fails_alone(tmp_path: Path, asks: list[Ask]) -> None:
    with crashing_daemon(tmp_path, CrashPlan(tmp_path), *ONE_THREAD) as running:
        expected = undisturbed(running, asks)
        readers = begin(running, asks)
        poison = running.complete("This one kills.", seed=POISON_SEED, temperature=0.7)
        assert poison.status_code in (500, 503)
        assert poison.json()["error"]["code"] == "engine_crashed"
        # Once with the others and three times alone, because kills may come from outside. Then it is not tried again.
        assert running.metric("tiercel_engine_restarts_total") == 4
        assert not differences(readers, expected)
        running.assert_nothing_held()


def test_row_14_a_hung_engine_is_killed_and_streams_continue(tmp_path: Path, asks: list[Ask]) -> None:
    with daemon(tmp_path, "--stall-timeout", "5", *ONE_THREAD) as running:
        expected = undisturbed(running, asks)
        readers = begin(running, asks)
        engine = running.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        assert not differences(readers, expected)
        assert not Path(f"/proc/{engine}").exists()
        assert running.metric("tiercel_engine_restarts_total") == 1
        running.assert_nothing_held()


def test_row_15_a_crash_loop_ends_the_daemon(tmp_path: Path) -> None:
    """Engines that die while they compute nothing: no request can be the cause."""
    with daemon(tmp_path, *ONE_THREAD) as running:
        killed: set[int] = set()
        end_s = time.monotonic() + 60
        while running.process.poll() is None:
            assert time.monotonic() < end_s, "the daemon goes on"
            children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children")
            for pid in map(int, children.read_text().split() if children.exists() else ()):
                if pid not in killed and len(killed) < 3 and " tiercel.engine" in command_of(pid):
                    killed.add(pid)
                    time.sleep(0.2)
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        assert running.process.returncode == 3
        assert len(killed) == 3
        assert "tiercel: " in running.log.read_text()
        assert "Traceback" not in running.log.read_text()


def test_row_16_the_engine_ends_with_the_http_process_and_leaves_no_lock(tmp_path: Path) -> None:
    flags = ("--kv-disk-path", str(tmp_path / "kv"), "--kv-disk-size", "64M", *ONE_THREAD)
    with daemon(tmp_path, *flags) as running:
        begin(running, [Ask(PROMPTS[0], 500)])
        engine = running.engine_pid()
        running.process.send_signal(signal.SIGKILL)
        running.process.wait(10)
        wait_gone(engine, 10.0)
    with daemon(tmp_path, *flags) as again:
        assert text(again, "Hello") is not None
        assert again.stop() == 0


def test_row_21_a_request_that_exceeds_the_memory_limit_ends_alone(tmp_path: Path, asks: list[Ask]) -> None:
    """The kernel kills the engine; the next one goes on with the streams, and fails the request that it died of."""
    with crashing_daemon(tmp_path, CrashPlan(tmp_path), *ONE_THREAD) as running:
        expected = undisturbed(running, asks)
        with memory_group(HOG_BYTES // 2, (running.process.pid, running.engine_pid())):
            readers = begin(running, asks)
            hog = running.complete("This one takes memory.", seed=HOG_SEED, temperature=0.7)
            assert hog.status_code in (500, 503)
            assert hog.json()["error"]["code"] == "engine_crashed"
            assert not differences(readers, expected)
            running.assert_nothing_held()
        assert running.metric("tiercel_engine_restarts_total") >= 1
