"""Changes of settings of the real daemon under load, by SIGHUP and through /admin/config."""

import json
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.daemon import Daemon, daemon
from tests.e2e.test_life import LONG, lines

BOSS = {"authorization": "Bearer boss"}
FLAGS = ("--admin-key", "boss")


def events(running: Daemon, name: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for line in running.log.read_text().splitlines():
        if line.startswith("{") and name in json.loads(line)["event"]:
            found.append(json.loads(line))
    return found


def await_events(running: Daemon, name: str, count: int) -> list[dict[str, object]]:
    end_s = time.monotonic() + 20
    while len(found := events(running, name)) < count:
        assert running.process.poll() is None and time.monotonic() < end_s, running.log.read_text()
        time.sleep(0.02)
    return found


@pytest.mark.slow
def test_a_stream_continues_while_policy_limits_and_log_level_change(tmp_path: Path) -> None:
    file = tmp_path / "tiercel.toml"
    file.write_text('scheduling-policy = "fair"\n')
    with daemon(tmp_path, *FLAGS) as running:
        heard: list[str] = []
        thread = lines(running, {**LONG, "max_tokens": 250}, heard)
        for number, policy in enumerate(("fcfs", "priority", "fair", "priority"), 2):
            values = {"scheduling-policy": policy, "max-num-seqs": 2 + number}
            answer = running.http.patch("/admin/config", json=values, headers=BOSS)
            assert (answer.status_code, answer.json()["version"]) == (200, number)
        await_events(running, "settings set version=5 policy=priority", 1)
        file.write_text('scheduling-policy = "fcfs"\nlog-level = "debug"\n')
        running.process.send_signal(signal.SIGHUP)
        await_events(running, "settings set version=6 policy=fcfs", 1)
        thread.join(60)
        assert heard[-2:] == ["data: [DONE]", ""]
        assert '"finish_reason":"length"' in "".join(heard)
        shown = running.http.get("/admin/config", headers=BOSS).json()
        assert (shown["version"], shown["source"]) == (6, "reload")
        assert shown["settings"]["max-num-seqs"]["source"] == "default"
        assert running.complete("Once").status_code == 200
        running.assert_nothing_held()
        file.write_text("block-size = 32\n")
        running.process.send_signal(signal.SIGHUP)
        (refused,) = await_events(running, "config_refused", 1)
        assert "block-size = 32: needs a restart: memory and disks" in str(refused["reason"])
        assert running.metric("tiercel_config_version") == 6
        assert running.metric("tiercel_config_errors_total") == 1
        assert running.stop() == 0
