"""Fuzzed bodies get only 2xx and 4xx answers, in the shape of all errors, and leave nothing behind."""

import asyncio
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.seeds import fresh_seeds
from tests.server.bodies import CHAT, TEXT, fuzzed
from tests.server.fake_engine import Script
from tests.server.harness import Running, server_settings, until, with_server
from tiercel.server.http.message_failure import is_messages_path
from tiercel.values.units import MIB

BODIES = 300
ALL_BODIES = 10_000
MAX_GROWTH_BYTES = 24 * MIB
_ADMIN = {"content-type": "application/json", "authorization": "Bearer secret"}
_TENANT = {"content-type": "application/json", "authorization": "Bearer k"}


def _rss_bytes() -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


async def _send(server: Running, rng: random.Random, count: int, seen: Counter[tuple[str, int]]) -> None:
    for _ in range(count):
        method, route, body = fuzzed(rng)
        headers = _ADMIN if route.startswith("/admin/") else _TENANT
        answer = await server.http.request(method, route, content=body, headers=headers)
        seen[route, answer.status_code] += 1
        assert answer.status_code < 500, (method, route, body, answer.text)
        if answer.status_code >= 400:
            error = answer.json()["error"]
            names = {"message", "type", "details"} if is_messages_path(route) else {"message", "type", "param", "code"}
            assert set(error) == names, (method, route, body, answer.text)
            assert error["message"], (method, route, body)
        if route == "/admin/tenants" and answer.status_code == 200:
            restored = await server.http.put(route, json={"tenants": [{"name": "a", "keys": ["k"]}]}, headers=_ADMIN)
            assert restored.status_code == 200, restored.text


async def _assert_nothing_is_left(server: Running) -> None:
    context = server.context
    await until(lambda: context.client.sequences.num_unfinished == 0)
    assert context.admission.num_reserved == 0
    assert (context.client.sequences.num_tokenless, server.engine.live) == (0, 0)
    await until(lambda: context.answers.held_bytes == 0)  # a client may have read its answer before the task ends
    assert context.bodies.held_bytes == 0


@pytest.mark.parametrize("seed", [20, *fresh_seeds(1)])
def test_random_bodies_never_break_the_server(model_folder: Path, seed: int) -> None:
    async def test(server: Running) -> None:
        seen: Counter[tuple[str, int]] = Counter()
        await _send(server, random.Random(seed), BODIES, seen)
        for route in (CHAT, TEXT):
            assert seen[route, 200] > 3
            assert seen[route, 400] > 10
        await _assert_nothing_is_left(server)

    with_server(server_settings(model_folder), test, Script(), admin_key="secret")


@pytest.mark.slow
def test_ten_thousand_fuzzed_bodies_leave_the_memory_flat(model_folder: Path) -> None:
    (seed,) = fresh_seeds(1)
    print("seed", seed)

    async def test(server: Running) -> None:
        seen: Counter[tuple[str, int]] = Counter()
        rng = random.Random(seed)
        await _send(server, rng, ALL_BODIES // 4, seen)
        before = _rss_bytes()
        await _send(server, rng, 3 * ALL_BODIES // 4, seen)
        assert seen.total() == ALL_BODIES
        await _assert_nothing_is_left(server)
        await asyncio.sleep(0)
        assert _rss_bytes() - before < MAX_GROWTH_BYTES

    with_server(server_settings(model_folder), test, Script(), admin_key="secret", enable_log_requests=False)
