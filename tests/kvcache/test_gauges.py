"""The gauges of the tiers: blocks by tenant."""

from array import array

from tests.kvcache.test_manager import BLOCK, Driver
from tiercel.kvcache.manager import CacheManager
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.outcome import TenantBlocks
from tiercel.values.tier import Tier

A, B = TenantId("a"), TenantId("b")


def _opened(cache: CacheManager, driver: Driver, seq: int, tenant: TenantId, blocks: int) -> None:
    driver.tokens[seq] = array("I", range(seq * 1000, seq * 1000 + blocks * BLOCK))
    cache.open(SeqId(seq), driver.tokens[seq], tenant.encode(), tenant)
    driver.compute(seq)


def test_tables_and_cached_copies_are_shown_by_tenant_largest_first() -> None:
    driver = Driver(16)
    cache = driver.cache
    _opened(cache, driver, 1, A, 2)
    _opened(cache, driver, 2, B, 5)
    (hbm,) = cache.tier_gauges()
    assert hbm.tier is Tier.HBM
    assert hbm.tenants == (TenantBlocks(B, 5, 0), TenantBlocks(A, 2, 0))
    cache.close(SeqId(2))
    _opened(cache, driver, 3, B, 1)
    (hbm,) = cache.tier_gauges()
    assert hbm.tenants == (TenantBlocks(B, 1, 5), TenantBlocks(A, 2, 0))
    cache.close(SeqId(1))
    cache.close(SeqId(3))
    (hbm,) = cache.tier_gauges()
    assert hbm.tenants == (TenantBlocks(B, 0, 6), TenantBlocks(A, 0, 2))
    assert hbm.blocks_cached == 8


def test_the_smallest_of_many_tenants_are_not_shown() -> None:
    driver = Driver(64)
    for seq in range(1, 41):
        _opened(driver.cache, driver, seq, TenantId(f"t{seq}"), 2 if seq == 40 else 1)
    (hbm,) = driver.cache.tier_gauges()
    assert len(hbm.tenants) == 32
    assert hbm.tenants[0].tenant == "t40"
