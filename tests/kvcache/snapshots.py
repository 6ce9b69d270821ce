"""The books of a tier in comparable form."""

from tiercel.kvcache.eviction import CopyBook, RetentionClass
from tiercel.kvcache.pool import SlotPool
from tiercel.values.ids import SlotId


def snapshot_of_copies(copies: CopyBook) -> object:
    orders = [tuple(copies.order(retention)) for retention in RetentionClass]
    counts = copies.count, [copies.num_retained(retention) for retention in RetentionClass], copies.counts_by_owner()
    return orders, bytes(copies.classes), copies.owners.tolist(), counts


def snapshot_of_pool(pool: SlotPool) -> object:
    return (
        bytes(pool.states),
        *(counts.tolist() for counts in (pool.refs, pool.transfer_refs, pool.deferred.last_steps)),
        dict(pool.slot_by_key),
        [pool.key(SlotId(slot)) for slot in range(pool.blocks + 1)],
        pool.deferred.slots_by_step(),
        snapshot_of_copies(pool.copies),
        (pool.deferred.committed, pool.num_free, pool.num_deferred, pool.num_coming),
    )
