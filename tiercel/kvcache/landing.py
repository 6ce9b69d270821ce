"""The end of transfers: the retention class of their copies, and the slots that they give back."""

import numpy as np

from tiercel.kvcache.disk_traffic import DiskTraffic
from tiercel.kvcache.eviction import RetentionClass
from tiercel.kvcache.pool import SlotPool
from tiercel.kvcache.slot_index import MIN_NUMPY_SLOTS, as_slots
from tiercel.kvcache.swap import SwapBook
from tiercel.kvcache.table import BlockTable
from tiercel.kvcache.tiers import TierSet
from tiercel.values.ids import BlockKey, SlotId
from tiercel.values.tier import Landing, Route, Transfer, Verdict


class LandingBook:
    """Books transfers that have landed, failed or are late."""

    def __init__(self, tiers: TierSet, disk_traffic: DiskTraffic, swaps: SwapBook) -> None:
        self.misses = 0  # copies that were not what their keys promise
        self._tiers = tiers
        self._disk_traffic = disk_traffic
        self._swaps = swaps

    def land(self, landing: Landing) -> Transfer | None:
        """Book the news of one transfer. Return the transfer if it is over."""
        tiers = self._tiers
        if landing.verdict is Verdict.LATE:
            tiers.transfers.abandon(landing.id)
            return None
        transfer, table = tiers.transfers.close(landing.id)
        is_good = landing.verdict is Verdict.LANDED
        self.misses += landing.verdict is Verdict.MISS
        self._disk_traffic.note_landing(transfer, is_good=is_good)
        if table is not None:
            table.copied_s += landing.seconds
        match transfer.route:
            case Route.RESTORE:
                self._swaps.land_restore(transfer)
            case Route.SPILL:
                self._land_copies(transfer, tiers.device, tiers.require_host(), RetentionClass.SHADOW, is_good=is_good)
                self._swaps.retain_landed(transfer, table)
            case Route.PERSIST:
                is_reused = tiers.gateway.copies.retention(transfer.sources[0]) is RetentionClass.REUSED
                retention = RetentionClass.REUSED if is_reused else RetentionClass.ONCE
                self._land_copies(transfer, tiers.gateway, tiers.require_disk(), retention, is_good=is_good)
            case Route.PREFETCH:
                self._land_read(transfer, table, is_good=is_good)
                if landing.verdict in (Verdict.MISS, Verdict.FAILED):
                    # Or a bad sector would be read again and again.
                    tiers.require_disk().evict_key(transfer.keys[0])
            case Route.VERIFY:
                key, slot = transfer.keys[0], transfer.sources[0]
                self._land_target(tiers.gateway, key, slot, RetentionClass.REUSED, is_good=is_good)
            case Route.SIGN:
                for source in transfer.sources:
                    tiers.quotas.drop(tiers.gateway, source)
        return transfer

    def _land_read(self, transfer: Transfer, table: BlockTable | None, *, is_good: bool) -> None:
        """Book a block that was read from the disk, and keep it for its sequence if that still waits for it.

        The sequence may have ended, or have run meanwhile and wait again: then the fetch that asked for it is over.
        """
        disk, gateway, (key,) = self._tiers.require_disk(), self._tiers.gateway, transfer.keys
        if table is None or table.is_closed or key not in table.fetch.reads:
            self._land_copies(transfer, disk, gateway, RetentionClass.REUSED, is_good=is_good)
            return
        if is_good:
            self._swaps.note_fetched(table)
        self._land_copies(transfer, disk, gateway, RetentionClass.WANTED, is_good=is_good)
        table.fetch.reads.discard(key)
        if is_good and gateway.slot_by_key.get(key) == transfer.targets[0]:
            table.fetch.want(transfer.targets[0], gateway)

    def _land_copies(
        self, transfer: Transfer, above: SlotPool, into: SlotPool, retention: RetentionClass, *, is_good: bool
    ) -> None:
        """Name the copies of a transfer, the tail first: of a chain it is the first to be evicted."""
        if is_good and len(transfer.keys) >= MIN_NUMPY_SLOTS:
            self._land_many(transfer, above, into, retention)
            return
        for key, source, target in reversed(list(zip(transfer.keys, transfer.sources, transfer.targets, strict=True))):
            self._tiers.quotas.drop(above, source)
            self._land_target(into, key, target, retention, is_good=is_good)

    def _land_target(
        self, pool: SlotPool, key: BlockKey, target: SlotId, retention: RetentionClass, *, is_good: bool
    ) -> None:
        """Name one copy. It is worthless if it failed or if another copy got the key first."""
        if is_good and pool.publish(target, key) == target:
            pool.copies.set_retention(target, retention)
            self._tiers.quotas.drop(pool, target)
        else:
            self._tiers.quotas.discard(pool, target)

    def _land_many(self, transfer: Transfer, above: SlotPool, into: SlotPool, retention: RetentionClass) -> None:
        """Name many copies that have all landed, the tail first."""
        quotas, keys = self._tiers.quotas, transfer.keys[::-1]
        sources, targets = as_slots(transfer.sources)[::-1], as_slots(transfer.targets)[::-1]
        quotas.drop_many(above, sources)
        lost = into.publish_many(targets, keys)
        for target in lost.tolist():
            quotas.discard(into, SlotId(target))
        if len(lost):
            targets = targets[~np.isin(targets, lost)]
        into.copies.set_retention_many(targets, retention)
        quotas.drop_many(into, targets)
