"""Hostile schemas, patterns and grammars get 200 or 400, hold up no other request and leave the memory flat."""

import asyncio
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from tests.seeds import fast_and_slow, fresh_seeds
from tests.server.fake_engine import Script
from tests.server.grammar.hostile import hostile_fields
from tests.server.harness import Running, server_settings, text_body, until, with_server
from tiercel.values.units import MIB

MAX_GROWTH_BYTES = 24 * MIB


def _rss_bytes(pid: int | str = "self") -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


async def _send(server: Running, rng: random.Random, count: int, seen: Counter[int]) -> None:
    for _ in range(count):
        fields = hostile_fields(rng)
        body = json.dumps(text_body(max_tokens=1, **fields)).encode("utf-8", "surrogatepass")
        answer = await server.http.post(
            "/v1/completions", content=body, headers={"content-type": "application/json"}, timeout=60
        )
        seen[answer.status_code] += 1
        assert answer.status_code in (200, 400), (fields, answer.text)
        if answer.status_code == 400:
            assert answer.json()["error"]["message"]


@pytest.mark.parametrize("seed", fast_and_slow([16, *fresh_seeds(1)], []))
def test_hostile_constraints_get_answers(model_folder: Path, seed: int) -> None:
    async def test(server: Running) -> None:
        seen: Counter[int] = Counter()
        await _send(server, random.Random(seed), 40, seen)
        assert seen[200]
        assert seen[400]

    with_server(server_settings(model_folder), test, Script(), enable_log_requests=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2016, *fresh_seeds(1)])
def test_two_hundred_hostile_constraints_hold_up_nothing(model_folder: Path, seed: int) -> None:
    async def test(server: Running) -> None:
        seen: Counter[int] = Counter()
        answered = 0

        async def send_plain() -> None:
            nonlocal answered
            while True:
                answer = await server.http.post("/v1/completions", json=text_body(max_tokens=1))
                assert answer.status_code == 200
                answered += 1
                await asyncio.sleep(0.01)

        rng = random.Random(seed)
        await _send(server, rng, 100, seen)  # fills caches and starts processes
        before = _rss_bytes()
        plain = asyncio.create_task(send_plain())
        await asyncio.gather(*(_send(server, random.Random(rng.random()), 50, seen) for _ in range(4)))
        plain.cancel()
        assert answered > 20
        assert seen.total() == 300
        await until(lambda: server.context.client.sequences.num_unfinished == 0)
        assert _rss_bytes() - before < MAX_GROWTH_BYTES
        assert all(_rss_bytes(pid) < 400 * MIB for pid in server.context.grammars.pids)

    with_server(server_settings(model_folder), test, Script(), enable_log_requests=False)
