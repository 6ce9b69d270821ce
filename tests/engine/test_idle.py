"""The work of the loop in idle time: finished prompts are persisted, and the copies are reported."""

import pytest

from tests.engine.test_loop_tiers import BLOCK, TierBench
from tiercel.kvcache.tiers import TierLimits
from tiercel.values.block_key import child_key, namespace_key
from tiercel.values.ids import BlockKey
from tiercel.values.request import pack_tokens
from tiercel.values.tier import Route, Tier

PROMPT = list(range(20)) * 3  # 15 blocks


def on_disk(bench: TierBench) -> int:
    return next(pool.num_cached for tier, pool in bench.cache.tiers.pools() if tier is Tier.SSD)


def keys_of(prompt: list[int]) -> list[BlockKey]:
    """Return the keys of the full blocks, head first."""
    keys = [namespace_key(b"sim", b"")]
    for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
        keys.append(child_key(keys[-1], pack_tokens(prompt[start : start + BLOCK])))
    return keys[1:]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("host", [0, 60, 8, 2], ids=["one arena", "roomy DDR", "small DDR", "tiny DDR"])
def test_a_prompt_is_persisted_after_its_first_request(host: int, depth: int) -> None:
    bench = TierBench(blocks=24, host=host, disk=100, depth=depth)
    bench.submit(PROMPT, max_tokens=1)
    bench.run()
    bench.assert_all_right()
    assert on_disk(bench) == len(PROMPT) // 4
    assert not bench.loop.has_unsaved


def test_blocks_in_memory_are_still_persisted_after_the_last_answer() -> None:
    bench = TierBench(blocks=24, host=0, disk=100)
    bench.submit(PROMPT, max_tokens=1)
    while not bench.loop.is_idle:
        bench.step()
    assert bench.loop.has_unsaved
    while bench.loop.has_unsaved:
        bench.step()
    assert on_disk(bench) == len(PROMPT) // 4


def test_quitting_does_not_wait_for_blocks_that_may_not_be_written() -> None:
    bench = TierBench(blocks=24, host=0, disk=100, limits=TierLimits(daily_blocks=2))
    bench.submit(PROMPT, max_tokens=1)
    bench.run()
    assert on_disk(bench) == 2
    assert not bench.loop.has_unsaved


def test_copies_between_requests_are_reported_when_they_have_landed() -> None:
    bench = TierBench(blocks=24, host=0, disk=100)
    bench.submit(PROMPT, max_tokens=1)
    bench.run()
    bench.clock.advance(1.0)
    bench.loop.step()
    told = bench.client.reports[-1].gauges
    assert told is not None
    cached = {gauges.tier: gauges.blocks_cached for gauges in told.tiers}
    assert cached[Tier.SSD] == len(PROMPT) // 4
    assert bench.mover.bytes_by_route[Route.PERSIST] > 0
    count = len(bench.client.reports)
    for _ in range(3):
        bench.clock.advance(1.0)
        bench.loop.step()
    assert len(bench.client.reports) == count


def test_the_tail_of_a_chain_on_the_disk_is_evicted_first() -> None:
    bench = TierBench(blocks=40, host=0, disk=20)
    bench.submit(PROMPT, max_tokens=1)
    bench.run()
    assert on_disk(bench) == len(PROMPT) // 4
    bench.submit([*range(20, 0, -1)] * 2, max_tokens=1)  # 10 blocks more, for 5 free slots
    bench.run()
    disk = bench.cache.tiers.disk
    assert disk is not None
    left = [key in disk.slot_by_key for key in keys_of(PROMPT)]
    assert 0 < sum(left) < len(left)
    assert left == sorted(left, reverse=True)  # the head is there, the tail went
