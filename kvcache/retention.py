"""What many copies at once are kept for: wanted, given up, promoted and landed."""

import numpy as np

from tiercel.ids import SlotId
from tiercel.kvcache.copy_link import CopyLinks
from tiercel.kvcache.eviction import RetentionClass
from tiercel.kvcache.pool import SlotPool, SlotState
from tiercel.kvcache.quota import CopyQuotas
from tiercel.kvcache.slot_index import SlotIndex, Slots, as_slots
from tiercel.kvcache.step_budget import StepBudget
from tiercel.kvcache.table import BlockTable, RetainedCopies
from tiercel.tier import Transfer

_BATCH = 1024  # blocks looked up at once, as long as the device tier has them all
_BLOCKS_OF_LOOK = 4  # of a batch cost as much as one that is looked up alone


def want_run(
    table: BlockTable,
    limit: int,
    budget: StepBudget,
    device: SlotPool,
    gateway: SlotPool,
    links: CopyLinks | None,
    max_wanted: int,
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
        slots = slots[
            gateway.are_retained(slots, RetentionClass.ONCE) | gateway.are_retained(slots, RetentionClass.REUSED)
        ]
        slots = slots[: max(0, max_wanted - gateway.num_retained(RetentionClass.WANTED))]
        if len(slots):
            gateway.set_retention_many(slots, RetentionClass.WANTED)
            fetch.runs.append(RetainedCopies(slots, gateway.lives[slots]))
        if found < count:
            return True
    return True


def demote(pool: SlotPool, retained: RetainedCopies, retention: RetentionClass, links: CopyLinks | None) -> None:
    """Copies that were kept for a sequence are kept as anything that was used, where they are still what they were.

    With `links` the pool is DDR, and copies of blocks that the device tier has are shadows.
    """
    index = SlotIndex(retained.slots)
    is_same = (index.read(pool.lives) == retained.lives) & (index.read(pool.slot_by_key.all_named) > 0)
    index = index.filter(is_same & pool.are_retained(index, retention))
    if links is not None:
        is_shadow = index.read(links.above) > 0
        pool.set_retention_many(index.filter(is_shadow), RetentionClass.SHADOW)
        index = index.filter(~is_shadow)
    pool.set_retention_many(index, RetentionClass.REUSED)


def promote(device: SlotPool, host: SlotPool, links: CopyLinks, slots: Slots) -> None:
    """The device tier loses copies: what lies below is the last copy now, and worth as much as that one was."""
    below = SlotIndex(slots).read(links.below).astype(np.intp)
    is_shadow = (below > 0) & host.are_retained(below, RetentionClass.SHADOW) & (host.slot_by_key.all_named[below] > 0)
    below, is_reused = below[is_shadow], device.are_retained_beyond(slots[is_shadow], RetentionClass.ONCE)
    host.set_retention_many(below[is_reused], RetentionClass.REUSED)
    host.set_retention_many(below[~is_reused], RetentionClass.ONCE)


def land_many(
    transfer: Transfer, above: SlotPool, into: SlotPool, retention: RetentionClass, quotas: CopyQuotas
) -> None:
    """Name many copies that have landed whole, the tail first: of a chain it is the first to be evicted."""
    keys = transfer.keys[::-1]
    sources, targets = as_slots(transfer.sources)[::-1], as_slots(transfer.targets)[::-1]
    quotas.drop_many(above, sources)
    lost = into.publish_many(targets, keys)
    for target in lost.tolist():
        quotas.discard(into, SlotId(target))
    if len(lost):
        targets = targets[~np.isin(targets, lost)]
    into.set_retention_many(targets, retention)
    quotas.drop_many(into, targets)
