"""Row 35: engines killed at named points and at random times, under load and with all tiers in use.

Every stream must have received what it receives from an engine that nobody kills: no wrong token, none twice, none
missing. The books of the engine that survives must be consistent and hold nothing.
"""

import itertools
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.daemon import Daemon
from tests.e2e.prompts import ONE_THREAD, PROMPTS
from tests.faults.crash_plan import POINTS, Crash, CrashPlan
from tests.faults.streams import Ask, Heard, crashing_daemon, make_asks, stream_all, wait_until_idle
from tests.seeds import fresh_seeds

CLIENTS = 8
LOADS = 3  # each fills most of the disk, so that blocks are written to it as long as loads take turns
QUICK_KILLS, KILLS = 4, 200
RESTARTS = "tiercel_engine_restarts_total"


def flags(folder: Path) -> tuple[str, ...]:
    """Return flags for a device pool of two prompts, a DDR tier of a few, and a disk for most of them."""
    disk = ("--kv-disk-path", str(folder / "kv"), "--kv-disk-size", "32M")
    pools = ("--cpu-device-pool", "--num-gpu-blocks-override", "120", "--kv-host-size", "8M")
    return (*disk, *pools, "--max-model-len", "1024", *ONE_THREAD)


def random_crashes(rng: random.Random, count: int) -> list[Crash]:
    """Return crashes in rounds: each round has every point once, in random order.

    So no three kills before the first step, of which no request can be the cause, come within a minute. The first
    engine has no copies of an earlier one to verify, so that the first crash is another.
    """
    crashes: list[Crash] = []
    while len(crashes) < count:
        crashes += [
            Crash(point, rng.randint(1, 2 if point == "verify" else 10)) for point in rng.sample(POINTS, len(POINTS))
        ]
    if crashes[0].point == "verify":
        crashes[0], crashes[1] = crashes[1], crashes[0]
    return crashes[:count]


def compare(asks: list[Ask], expected: list[Heard], heard: list[Heard], seed: int) -> None:
    """Assert that every stream is the expected one."""
    wrong = [
        f"{ask}\nexpected {right}\nreceived {got}"
        for ask, right, got in zip(asks, expected, heard, strict=True)
        if right.outcome != got.outcome
    ]
    assert not wrong, f"seed {seed}: {len(wrong)} of {len(asks)} streams differ; the first one:\n{wrong[0]}"


def serve_with_kills(folder: Path, kills: int, seed: int) -> Counter[str]:
    """Stream until the planned kills have happened; return the kills by point."""
    rng = random.Random(seed)
    calm = folder / "calm"
    calm.mkdir()
    loads: list[tuple[list[Ask], list[Heard]]] = []
    with crashing_daemon(calm, CrashPlan(calm), *flags(calm)) as running:
        for number in range(LOADS):
            asks = make_asks(rng, [f"Load {number}. {prompt}" for prompt in PROMPTS], 3 * CLIENTS, (20, 80))
            expected = stream_all(running.url, asks, CLIENTS)
            assert all(heard.is_complete and not heard.errors for heard in expected)
            loads.append((asks, expected))
    plan, crashes = CrashPlan(folder), random_crashes(rng, kills)
    plan.write(crashes)
    rounds = itertools.cycle(loads)
    with crashing_daemon(folder, plan, *flags(folder)) as running:
        while len(plan.done()) < kills:
            before = len(plan.done())
            for _ in range(10):  # a crash at a point that this load seldom reaches may take several rounds
                asks, expected = next(rounds)
                compare(asks, expected, stream_all(running.url, asks, CLIENTS), seed)
                if len(plan.done()) > before:
                    break
            assert len(plan.done()) > before, f"seed {seed}: {crashes[before]} was never reached"
        asks, expected = next(rounds)
        compare(asks, expected, stream_all(running.url, asks, CLIENTS), seed)
        wait_until_idle(running, plan)
        assert running.metric(RESTARTS) == kills
        assert running.stop() == 0
    return Counter(plan.done())


@pytest.mark.parametrize("seed", fresh_seeds(1))
def test_row_35_kills_at_named_points_change_no_token(tmp_path: Path, seed: int) -> None:
    assert serve_with_kills(tmp_path, len(POINTS), seed) == dict.fromkeys(POINTS, 1)


@pytest.mark.long
@pytest.mark.parametrize("seed", fresh_seeds(1))
def test_row_35_two_hundred_kills_at_named_points_change_no_token(tmp_path: Path, seed: int) -> None:
    killed = serve_with_kills(tmp_path, KILLS, seed)
    print(f"seed {seed}: {dict(killed)}")
    assert set(killed) == set(POINTS)


class RandomKiller(threading.Thread):
    """Kills the engine at random times while several sequences get tokens.

    An engine that has delivered nothing yet is spared: three such deaths in a minute end the daemon.
    """

    def __init__(self, running: Daemon, rng: random.Random, kills: int) -> None:
        super().__init__(daemon=True)
        self._running = running
        self._rng = rng
        self._kills = kills
        self.has_finished = threading.Event()

    def run(self) -> None:
        running, done = self._running, 0
        try:
            while done < self._kills:
                tokens = running.metric("vllm:generation_tokens_total")
                time.sleep(self._rng.uniform(0.2, 1.5))
                if running.http.get("/ready").status_code != 200 or running.metric(RESTARTS) != done:
                    continue
                is_busy = running.metric("vllm:num_requests_running") >= 2
                if is_busy and running.metric("vllm:generation_tokens_total") > tokens + 20:
                    os.kill(running.engine_pid(), signal.SIGKILL)
                    done += 1
        finally:
            self.has_finished.set()


@pytest.mark.parametrize("kills", [QUICK_KILLS, pytest.param(KILLS, marks=pytest.mark.long)])
@pytest.mark.parametrize("seed", fresh_seeds(1))
def test_row_35_kills_at_random_times_change_no_token(tmp_path: Path, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    plan = CrashPlan(tmp_path)
    asks = make_asks(rng, PROMPTS, 3 * CLIENTS, (20, 80))
    with crashing_daemon(tmp_path, plan, *flags(tmp_path)) as running:
        expected = stream_all(running.url, asks, CLIENTS)
        killer = RandomKiller(running, rng, kills)
        killer.start()
        while not killer.has_finished.is_set():
            compare(asks, expected, stream_all(running.url, asks, CLIENTS), seed)
        compare(asks, expected, stream_all(running.url, asks, CLIENTS), seed)
        wait_until_idle(running, plan)
        assert running.metric(RESTARTS) == kills
        assert running.stop() == 0
