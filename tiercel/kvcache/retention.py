"""Changes of the retention class of many copies at once."""

import numpy as np

from tiercel.kvcache.copy_link import CopyLinks
from tiercel.kvcache.eviction import RetentionClass
from tiercel.kvcache.pool import SlotPool
from tiercel.kvcache.slot_index import SlotIndex, Slots
from tiercel.kvcache.slot_state import SlotState
from tiercel.kvcache.step_budget import BLOCKS_PER_LOOK, MAX_BATCH, StepBudget
from tiercel.kvcache.table import BlockTable, RetainedCopies


def want_run(
    table: BlockTable,
    limit: int,
    budget: StepBudget,
    device: SlotPool,
    gateway: SlotPool,
    links: CopyLinks | None,
    max_wanted: int,
) -> bool:
    """Pass over a waiting sequence's next blocks that the device tier has, and keep their copies from eviction.

    `links` lead from the device tier to the gateway, if those are two. Return False if the budget ends before.
    """
    fetch, batch = table.fetch, 8
    while fetch.cursor < limit:
        count = min(limit - fetch.cursor, batch)
        batch = min(8 * batch, MAX_BATCH)
        if not budget.take_looks(-(-count // BLOCKS_PER_LOOK)):
            return False
        slots = device.slot_by_key.find(table.keys(fetch.cursor, fetch.cursor + count))
        found = len(slots)
        fetch.cursor += found
        if links is not None:
            slots = links.below[slots].astype(np.intp)
        slots = slots[gateway.all_states[slots] == SlotState.CACHED]
        classes = gateway.copies.all_classes[slots]
        slots = slots[(classes == RetentionClass.ONCE) | (classes == RetentionClass.REUSED)]
        slots = slots[: max(0, max_wanted - gateway.copies.num_retained(RetentionClass.WANTED))]
        if len(slots):
            gateway.copies.set_retention_many(slots, RetentionClass.WANTED)
            fetch.runs.append(RetainedCopies(slots, gateway.versions.lives[slots]))
        if found < count:
            return True
    return True


def demote(pool: SlotPool, retained: RetainedCopies, retention: RetentionClass, links: CopyLinks | None) -> None:
    """Keep copies that were kept for one sequence as any used copy, if they still are the same copies.

    With `links` the pool is DDR, and copies of blocks that the device tier has become shadows.
    """
    index = SlotIndex(retained.slots)
    is_same = (index.read(pool.versions.lives) == retained.lives) & (index.read(pool.slot_by_key.all_named) > 0)
    index = index.filter(is_same & pool.copies.are_retained(index, retention))
    if links is not None:
        is_shadow = index.read(links.above) > 0
        pool.copies.set_retention_many(index.filter(is_shadow), RetentionClass.SHADOW)
        index = index.filter(~is_shadow)
    pool.copies.set_retention_many(index, RetentionClass.REUSED)


def promote(device: SlotPool, host: SlotPool, links: CopyLinks, slots: Slots) -> None:
    """Promote the shadows of device copies that are being evicted: each is the last copy in memory from now on.

    It gets the class of the evicted copy, as far as that is ONCE or REUSED.
    """
    below = SlotIndex(slots).read(links.below).astype(np.intp)
    is_shadow = (below > 0) & host.copies.are_retained(below, RetentionClass.SHADOW)
    is_shadow &= host.slot_by_key.all_named[below] > 0
    is_reused = device.copies.all_classes[slots[is_shadow]] > RetentionClass.ONCE
    below = below[is_shadow]
    host.copies.set_retention_many(below[is_reused], RetentionClass.REUSED)
    host.copies.set_retention_many(below[~is_reused], RetentionClass.ONCE)
