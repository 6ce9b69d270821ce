"""The state of the tiers in numbers, for the metrics."""

import numpy as np

from tiercel.kvcache.disk_traffic import DiskTraffic
from tiercel.kvcache.owner import TenantHoldings
from tiercel.kvcache.pool import SlotPool
from tiercel.kvcache.tiers import TierSet
from tiercel.values.outcome import TenantBlocks, TierGauges
from tiercel.values.tier import Tier

_MAX_TENANTS = 32  # shown by name, in each tier


def tier_gauges(
    tiers: TierSet,
    disk_traffic: DiskTraffic,
    holdings: TenantHoldings,
    asked_tokens: int,
    hit_tokens: int,
    loaded_tokens: int,
    fetched_tokens: int,
    block_bytes: int,
) -> tuple[TierGauges, ...]:
    """Return the gauges of every tier that exists. Tokens that a tier did not have were looked up in the next one."""
    found_by_tier = {Tier.HBM: hit_tokens, Tier.DDR: loaded_tokens, Tier.SSD: fetched_tokens}
    gauges: list[TierGauges] = []
    for tier, pool in tiers.pools():
        asked_tokens = max(0, asked_tokens - found_by_tier[tier])
        gauges.append(
            TierGauges(
                tier=tier,
                block_bytes=block_bytes,
                blocks_total=pool.blocks,
                blocks_used=pool.num_owned + pool.num_deferred,
                blocks_cached=pool.num_cached,
                hit_tokens=found_by_tier[tier],
                missed_tokens=asked_tokens,
                evictions=pool.evictions,
                mean_run_blocks=pool.mean_run,
                daily_blocks=disk_traffic.budget.daily_blocks if tier is Tier.SSD else 0,
                writable_blocks=(disk_traffic.budget.blocks or 0) if tier is Tier.SSD else 0,
                tenants=_tenant_blocks(pool, holdings, in_tables=tier is Tier.HBM),
            )
        )
    return tuple(gauges)


def _tenant_blocks(pool: SlotPool, holdings: TenantHoldings, *, in_tables: bool) -> tuple[TenantBlocks, ...]:
    """Return the tenants with the most blocks in a tier. Tables hold blocks of the device tier alone."""
    cached = pool.copies.nums_cached_of(holdings.owners)
    used = holdings.blocks if in_tables else np.zeros(len(cached), np.intp)
    size = used + cached
    largest = np.argsort(-size, kind="stable")[:_MAX_TENANTS]
    numbers: list[int] = largest[size[largest] > 0].tolist()
    return tuple(TenantBlocks(holdings.tenants[one], int(used[one]), int(cached[one])) for one in numbers)
