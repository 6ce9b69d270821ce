"""Block locations of victims, and the reported cost of finished preemptions."""

import pytest

from tests.engine.test_loop_tiers import BLOCK, SLOW, TierBench
from tiercel.settings.settings import PreemptionMode
from tiercel.values.ids import SeqId
from tiercel.values.tier import Route, Tier

PROMPT = list(range(20)) * 3  # tokens
HITS = (len(PROMPT) - 1) // BLOCK  # blocks that are prefix hits: one token is always computed


def below(bench: TierBench, seq: SeqId) -> tuple[int, int, int]:
    return bench.cache.ledger().blocks_below(seq)


def served(bench: TierBench) -> SeqId:
    """Submit a prompt twice, so that every tier holds its blocks. Return the second sequence."""
    bench.submit(PROMPT, max_tokens=1)
    bench.run()
    again = bench.submit(PROMPT, max_tokens=20)
    while len(bench.cache.slots(again)) < len(PROMPT) // BLOCK:
        bench.step()
    return again


def test_blocks_in_no_lower_tier_are_dirty() -> None:
    bench = TierBench(tokens=64)
    seq = bench.submit(PROMPT)
    bench.loop.step()
    bench.loop.step()  # the first step is committed; nothing has landed yet
    dirty, near, far = below(bench, seq)
    assert dirty + near == bench.book[seq].computed // BLOCK > 0
    assert far == 0


def test_blocks_in_ddr_are_near_and_blocks_on_the_ssd_are_far() -> None:
    bench = TierBench(disk=100)
    assert below(bench, served(bench)) == (0, HITS, 0)
    bench = TierBench(host=0, disk=100)
    assert below(bench, served(bench)) == (0, 0, HITS)


def test_blocks_that_do_not_fit_into_ddr_are_far_or_lost() -> None:
    small = TierBench(host=2, disk=100)
    dirty, near, far = below(small, seq := served(small))
    room = next(pool.num_free + pool.num_cached for tier, pool in small.cache.tiers.pools() if tier is Tier.DDR)
    assert dirty == min(room - near, HITS - near), "its own copies are kept, not room"
    assert far == HITS - near - dirty > 0
    lost = TierBench(host=2)
    dirty, near, far = below(lost, served(lost))
    assert dirty + near < small.book[seq].computed // BLOCK
    assert far == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("mode", ["swap", "recompute", "auto"])
@pytest.mark.sampled(4)
def test_every_completed_switch_has_a_prediction_and_an_outcome(mode: PreemptionMode, depth: int) -> None:
    bench = TierBench(mode=mode, depth=depth)
    for first in range(8):
        bench.submit([first, *range(12)], max_tokens=40)
    bench.run()
    bench.assert_all_right()
    gauges = bench.loop.gauges.read()
    by_mode = {one.mode: one for one in gauges.switches}
    told = sum(one.count for one in gauges.switches)
    assert 0 < told <= gauges.preemptions
    assert by_mode["swap"].count <= gauges.preemptions_swap
    assert by_mode["recompute"].count <= gauges.preemptions_recompute
    for one in gauges.switches:
        assert (one.predicted_s > 0) == (one.realised_s > 0) == (one.count > 0)


def test_the_copies_of_a_switch_are_attributed_to_its_victim() -> None:
    bench = TierBench(mode="swap", depth=0)
    for first in range(8):
        bench.submit([first, *range(12)], max_tokens=40)
    bench.run()
    swap = next(one for one in bench.loop.gauges.read().switches if one.mode == "swap")
    moved = sum(bench.mover.bytes_by_route[route] for route in (Route.SPILL, Route.RESTORE))
    copies = sum(bench.mover.copies_by_route[route] for route in (Route.SPILL, Route.RESTORE))
    assert bench.book.recomputed_tokens < bench.cache.swapped_tokens
    assert 0 < swap.realised_s <= moved / SLOW.spill_bytes_per_s + copies * SLOW.copy_s + bench.clock.now_s() - 100


def test_without_a_lower_tier_a_switch_costs_the_recomputing_steps() -> None:
    bench = TierBench(mode="auto", host=0, depth=0)
    for first in range(8):
        bench.submit([first, *range(12)], max_tokens=40)
    bench.run()
    swap, recompute = bench.loop.gauges.read().switches
    assert swap.count == 0
    assert 0 < recompute.realised_s < bench.clock.now_s() - 100
