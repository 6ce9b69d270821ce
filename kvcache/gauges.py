"""The tiers in numbers."""

import numpy as np

from tiercel.kvcache.owner import Held
from tiercel.kvcache.pool import SlotPool
from tiercel.kvcache.tiers import TierBook
from tiercel.outcome import TenantBlocks, TierGauges
from tiercel.tier import Tier

_MAX_TENANTS = 32  # told by name, in each tier


def tier_gauges(
    tiers: TierBook,
    held: Held,
    asked_tokens: int,
    hit_tokens: int,
    loaded_tokens: int,
    fetched_tokens: int,
    block_bytes: int,
) -> tuple[TierGauges, ...]:
    """Every tier that exists. What a tier did not have was looked up in the next one. `held`: as `OwnerBook.held`."""
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
                daily_blocks=tiers.limits.daily_blocks if tier is Tier.SSD else 0,
                writable_blocks=(tiers.budget.blocks or 0) if tier is Tier.SSD else 0,
                tenants=_tenant_blocks(pool, held, in_tables=tier is Tier.HBM),
            )
        )
    return tuple(gauges)


def _tenant_blocks(pool: SlotPool, held: Held, *, in_tables: bool) -> tuple[TenantBlocks, ...]:
    """The tenants that have most in a tier. Tables hold blocks of the device tier alone. Cost: numpy's alone."""
    cached = pool.num_cached_of_many(held.owners)
    used = held.blocks if in_tables else np.zeros(len(cached), np.intp)
    size = used + cached
    largest = np.argsort(-size, kind="stable")[:_MAX_TENANTS]
    numbers: list[int] = largest[size[largest] > 0].tolist()
    return tuple(TenantBlocks(held.tenants[one], int(used[one]), int(cached[one])) for one in numbers)
