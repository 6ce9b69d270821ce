"""Quotas and floors of tenants, as the tiers use them."""

from tiercel.kvcache.owner import OwnerBook
from tiercel.kvcache.pool import SlotPool
from tiercel.kvcache.quota import CopyQuotas
from tiercel.values.ids import TenantId
from tiercel.values.tenant import KvQuota, Tenants, TenantShare
from tiercel.values.tier import Tier

A, B = TenantId("a"), TenantId("b")


def test_floors_follow_weights_and_quotas_are_in_blocks() -> None:
    pool = SlotPool(1000)
    quotas = CopyQuotas({Tier.DDR: SlotPool(100), Tier.SSD: SlotPool(100)})
    owners = OwnerBook(quotas, (pool,))
    first = owners[A]
    shares = (TenantShare(name=A, weight=3.0, kv_quota=KvQuota(ddr=1000, ssd=4095)), TenantShare(name=B))
    owners.set_tenants(Tenants(1, shares), 100)
    assert (first, owners[B], owners[A]) == (1, 2, 1)
    assert pool.victims.floor_by_owner == {1: 75, 2: 25}
    assert [quotas.left(tier, owners[A]) for tier in (Tier.DDR, Tier.SSD)] == [10, 40]
    assert quotas.left(Tier.DDR, owners[B]) is None
    owners.set_tenants(Tenants(2, shares[:1]), 100)
    assert pool.victims.floor_by_owner == {}  # a tenant alone needs no floor
    owners.set_tenants(Tenants(3, ()), 100)
    assert not quotas.has_any


def test_a_flood_of_one_tenant_leaves_the_others_their_floor() -> None:
    pool = SlotPool(100)
    owners = OwnerBook(CopyQuotas({}), (pool,))
    owners.set_tenants(Tenants(1, (TenantShare(name=A), TenantShare(name=B))), 1)
    for tenant, blocks in ((A, 20), (B, 300)):
        for number in range(blocks):
            slot = pool.take()
            pool.publish(slot, (tenant.encode() + number.to_bytes(4, "big")).ljust(32))  # type: ignore[arg-type]
            pool.copies.set_owner(slot, owners[tenant])
            pool.drop(slot, 0)
    assert pool.copies.num_cached_of(owners[A]) == 5  # half of the tenth that all floors share
