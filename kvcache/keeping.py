"""What many copies at once are kept for: wanted, given up, promoted and landed."""

import numpy as np

from tiercel.ids import SlotId
from tiercel.kvcache.budget import StepBudget
from tiercel.kvcache.links import Links
from tiercel.kvcache.policy import Keep
from tiercel.kvcache.pool import SlotPool, SlotState
from tiercel.kvcache.quota import CopyQuotas
from tiercel.kvcache.table import BlockTable, Kept
from tiercel.kvcache.vector import Slots, Where, as_slots
from tiercel.tier import Transfer

_BATCH = 1024  # blocks looked up at once, as long as the device tier has them all
_BLOCKS_OF_LOOK = 4  # of a batch cost as much as one that is looked up alone


def want_run(
    table: BlockTable,
    limit: int,
    budget: StepBudget,
    device: SlotPool,
    gateway: SlotPool,
    links: Links | None,
    most_wanted: int,
) -> bool:
    """Pass over a waiting sequence's next blocks as long as the device tier has them, and keep them from eviction.

    `links` lead from the device tier to the gateway, where those are two. Return False when the budget ends before.
    """
    fetch, batch = table.fetch, 8
    while fetch.cursor < limit:
        count = min(limit - fetch.cursor, batch)
        batch = min(8 * batch, _BATCH)
        if not budget.take_looks(-(-count // _BLOCKS_OF_LOOK)):
            return False
        slots = device.slot_by_key.find(table.keys(fetch.cursor, fetch.cursor + count))
        found = len(slots)
        fetch.cursor += found
        if links is not None:
            slots = links.below[slots].astype(np.intp)
        slots = slots[gateway.all_states[slots] == SlotState.CACHED]
        slots = slots[gateway.are_kept(slots, Keep.ONCE) | gateway.are_kept(slots, Keep.REUSED)]
        slots = slots[: max(0, most_wanted - gateway.num_kept(Keep.WANTED))]
        if len(slots):
            gateway.set_keep_many(slots, Keep.WANTED)
            fetch.runs.append(Kept(slots, gateway.lives[slots]))
        if found < count:
            return True
    return True


def demote(pool: SlotPool, kept: Kept, keep: Keep, links: Links | None) -> None:
    """Copies that were kept for a sequence are kept as anything that was used, where they are still what they were.

    With `links` the pool is DDR, and copies of blocks that the device tier has are shadows.
    """
    where = Where(kept.slots)
    is_same = (where.of(pool.lives) == kept.lives) & (where.of(pool.slot_by_key.all_named) > 0)
    where = where.only(is_same & pool.are_kept(where, keep))
    if links is not None:
        is_shadow = where.of(links.above) > 0
        pool.set_keep_many(where.only(is_shadow), Keep.SHADOW)
        where = where.only(~is_shadow)
    pool.set_keep_many(where, Keep.REUSED)


def promote(device: SlotPool, host: SlotPool, links: Links, slots: Slots) -> None:
    """The device tier loses copies: what lies below is the last copy now, and worth as much as that one was."""
    below = Where(slots).of(links.below).astype(np.intp)
    is_shadow = (below > 0) & host.are_kept(below, Keep.SHADOW) & (host.slot_by_key.all_named[below] > 0)
    below, is_reused = below[is_shadow], device.are_kept_beyond(slots[is_shadow], Keep.ONCE)
    host.set_keep_many(below[is_reused], Keep.REUSED)
    host.set_keep_many(below[~is_reused], Keep.ONCE)


def land_many(transfer: Transfer, above: SlotPool, into: SlotPool, keep: Keep, quotas: CopyQuotas) -> None:
    """Name many copies that have landed whole, the tail first: of a chain it is the first to be evicted."""
    keys = transfer.keys[::-1]
    sources, targets = as_slots(transfer.sources)[::-1], as_slots(transfer.targets)[::-1]
    quotas.drop_many(above, sources)
    lost = into.publish_many(targets, keys)
    for target in lost.tolist():
        quotas.discard(into, SlotId(target))
    if len(lost):
        targets = targets[~np.isin(targets, lost)]
    into.set_keep_many(targets, keep)
    quotas.drop_many(into, targets)
