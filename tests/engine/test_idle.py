"""What the loop does with idle time: what was served once goes to the disk, and the HTTP process hears of it."""

import pytest

from kvcache.tiers import TierLimits
from tests.engine.test_loop_tiers import TierBench
from tiercel.tier import Route, Tier

PROMPT = list(range(20)) * 3  # 15 blocks


def on_disk(bench: TierBench) -> int:
    return next(pool.num_cached for tier, pool in bench.cache.tiers.pools() if tier is Tier.SSD)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("host", [0, 60, 8, 2], ids=["one arena", "roomy DDR", "small DDR", "tiny DDR"])
def test_a_prompt_served_once_is_persisted_whatever_ddr_holds(host: int, depth: int) -> None:
    bench = TierBench(blocks=24, host=host, disk=100, depth=depth)
    bench.submit(PROMPT, max_tokens=1)
    bench.run()
    bench.assert_all_right()
    assert on_disk(bench) == len(PROMPT) // 4
    assert not bench.loop.has_unsaved


def test_what_is_in_memory_can_still_be_saved_when_the_last_answer_is_out() -> None:
    bench = TierBench(blocks=24, host=0, disk=100)
    bench.submit(PROMPT, max_tokens=1)
    while not bench.loop.is_idle:
        bench.step()
    assert bench.loop.has_unsaved
    while bench.loop.has_unsaved:
        bench.step()
    assert on_disk(bench) == len(PROMPT) // 4


def test_what_may_not_be_written_is_not_waited_for() -> None:
    bench = TierBench(blocks=24, host=0, disk=100, limits=TierLimits(daily_blocks=2))
    bench.submit(PROMPT, max_tokens=1)
    bench.run()
    assert on_disk(bench) == 2
    assert not bench.loop.has_unsaved


def test_copies_between_requests_are_told_once_they_have_landed() -> None:
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
