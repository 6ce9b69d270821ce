"""A spill keeps the copies of its victim that are below already."""

from array import array

from tests.kvcache.test_retention import BLOCK, FIRST, OTHER, Steps
from tiercel.kvcache.eviction import RetentionClass
from tiercel.kvcache.manager import CacheManager
from tiercel.kvcache.slot_index import as_slots
from tiercel.kvcache.tiers import TierLimits
from tiercel.values.tier import Tier


def test_a_spill_evicts_other_copies_before_the_clean_copies_of_its_own_victim() -> None:
    steps = Steps()
    steps.cache = CacheManager(16, BLOCK, b"weights", host_blocks=8, limits=TierLimits(shadow_share=1.0))
    pools = dict(steps.cache.tiers.pools())
    steps.cache.open(OTHER, array("I", range(100, 117)), b"s")
    steps.compute(OTHER, 16)
    steps.write_back(OTHER)
    steps.cache.close(OTHER)
    pools[Tier.HBM].evict_many(as_slots(pools[Tier.HBM].copies))
    steps.cache.open(FIRST, array("I", range(33)), b"s")
    steps.compute(FIRST, 16)
    steps.write_back(FIRST)
    steps.compute(FIRST, 32)
    assert (steps.kept(RetentionClass.ONCE), steps.kept(RetentionClass.SHADOW)) == (4, 4), (
        "DDR is full: half of its copies are not FIRST's"
    )
    assert steps.cache.ledger().blocks_below(FIRST) == (4, 4, 0), "the price expects all blocks below"
    steps.land(steps.preempt(FIRST))
    assert steps.kept(RetentionClass.PREEMPTED) == 8
