"""The tiers in numbers."""

from kvcache.tiers import TierBook
from tiercel.outcome import TierGauges
from tiercel.tier import Tier


def tier_gauges(
    tiers: TierBook, asked_tokens: int, hit_tokens: int, loaded_tokens: int, fetched_tokens: int, block_bytes: int
) -> tuple[TierGauges, ...]:
    """Every tier that exists. What a tier did not have was looked up in the next one."""
    found_by_tier = {Tier.HBM: hit_tokens, Tier.DDR: loaded_tokens, Tier.SSD: fetched_tokens}
    gauges: list[TierGauges] = []
    for tier, pool in tiers.pools():
        asked_tokens = max(0, asked_tokens - found_by_tier[tier])
        gauges.append(
            TierGauges(
                tier=tier,
                block_bytes=block_bytes,
                blocks_total=pool.blocks,
                blocks_used=pool.num_owned + pool.num_limbo,
                blocks_cached=pool.num_cached,
                hit_tokens=found_by_tier[tier],
                missed_tokens=asked_tokens,
                evictions=pool.evictions,
                mean_run_blocks=pool.mean_run,
            )
        )
    return tuple(gauges)
