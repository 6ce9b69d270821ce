"""Preempted sequences' blocks on their way down, and the copies that a sequence restores from DDR."""

import functools
from collections.abc import Callable

import numpy as np

from tiercel.kvcache.disk_traffic import DiskTraffic
from tiercel.kvcache.eviction import RetentionClass
from tiercel.kvcache.quota import SpillRoom
from tiercel.kvcache.retention import demote, promote
from tiercel.kvcache.slot_index import NO_SLOTS, SlotIndex, Slots, as_index, as_slots
from tiercel.kvcache.slot_state import SlotState
from tiercel.kvcache.table import NO_COPIES, BlockTable, RetainedCopies
from tiercel.kvcache.tiers import TierSet
from tiercel.values.ids import BlockKey, SlotId
from tiercel.values.rates import Rates
from tiercel.values.tier import Purpose, Route, Tier, Transfer

_MAX_WRITES = 1024  # blocks of one victim that are written to the disk, each by a transfer of its own: about 5 ms


class SwapBook:
    """Spills of victims, restores from DDR, and the copies below that are kept for preempted sequences.

    A copy never differs from another copy with the same key, so it is dropped without notice and never written twice.
    """

    def __init__(self, tiers: TierSet, disk_traffic: DiskTraffic, block_size: int, rates: Callable[[], Rates]) -> None:
        self.swapped_blocks = 0  # that came up for preempted sequences since the start
        self._tiers = tiers
        self._disk_traffic = disk_traffic
        self._block_size = block_size
        self._rates = rates
        if tiers.host is not None and tiers.links is not None:
            tiers.device.on_evict = self._on_device_eviction
            tiers.device.on_evict_many = functools.partial(promote, tiers.device, tiers.host, tiers.links)

    # ---- facts

    @property
    def has_lower_tier(self) -> bool:
        """Whether a victim's blocks may survive below the device tier."""
        return self._tiers.host is not None or (self._tiers.disk is not None and self._disk_traffic.is_writable)

    def is_worth_loading(self, first: int, loads: int, covered: int) -> bool:
        """Return whether loading `loads` blocks is faster than computing blocks [first, covered) again."""
        if self._tiers.limits.always_loads:
            return True
        rates, size = self._rates(), self._block_size
        return rates.load_s(Route.RESTORE, loads) < rates.recompute_s(first * size, (covered - first) * size)

    def dirty(self, table: BlockTable) -> Slots:
        """Return the numbers of the table's full blocks that no lower tier holds or is about to hold."""
        if self._tiers.links is None or not self.has_lower_tier:
            return NO_SLOTS
        return np.flatnonzero(table.published().read(self._tiers.links.below) == 0)

    @property
    def num_spillable(self) -> int:
        """Blocks that could be spilled now. Copies kept for preempted sequences do not make room for another victim."""
        host = self._tiers.host
        if host is not None:
            return host.num_free + host.num_cached - host.copies.num_retained(RetentionClass.PREEMPTED)
        return min(self._disk_traffic.writable_blocks, _MAX_WRITES)

    def num_spillable_of(self, sources: Slots | SlotIndex) -> int:
        """Return how many of these copies count in `num_spillable`: a restore that holds them takes away that room."""
        host = self._tiers.host
        if host is None:
            return 0
        index = as_index(sources)
        is_kept = host.copies.are_retained(index, RetentionClass.PREEMPTED)
        return int(np.count_nonzero((index.read(host.all_states) == SlotState.CACHED) & ~is_kept))

    def num_clean(self, table: BlockTable) -> int:
        """Return how many copies of the table's blocks count in `num_spillable`: a spill of the table keeps them."""
        if self._tiers.host is None or self._tiers.links is None:
            return 0
        below = table.published().read(self._tiers.links.below)
        return self.num_spillable_of(below[below > 0].astype(np.intp))

    def spill_room(self) -> SpillRoom:
        """Return what could be spilled now, by blocks and by quotas."""
        tiers = self._tiers
        tier = Tier.SSD if tiers.host is None else Tier.DDR
        return SpillRoom(self.num_spillable, tier, tiers.device, tiers.quotas)

    # ---- inside a seal

    def spill(self, table: BlockTable, maximum: int) -> list[Transfer]:
        """Send a victim's dirty blocks down, at most `maximum`, head of the chain first, and keep its copies below.

        Return the transfers to the disk. Those to DDR are prepared, and start a few at a time.
        """
        tiers, host = self._tiers, self._tiers.host
        slots, blocks = table.published(), self.dirty(table)
        sources = slots.pick(blocks)
        sources = sources.head(min(maximum, self.spill_room().take(sources, self.num_clean(table))))
        blocks = blocks[: len(sources)]
        tiers.device.hold_many(sources, by_transfer=True)
        if host is None or tiers.links is None:
            pairs = zip(table.keys_of(blocks), sources.slots.tolist(), strict=True)
            return [self._disk_traffic.write(key, SlotId(slot), Purpose.SPILL, table) for key, slot in pairs]
        clean = slots.read(tiers.links.below)
        copies = SlotIndex(clean[clean > 0].astype(np.intp))
        # Before room is made for the others, or these copies would be the first to be evicted.
        landed = copies.filter(copies.read(host.slot_by_key.all_named) > 0)
        host.copies.set_retention_many(landed, RetentionClass.PREEMPTED)
        if len(sources):
            targets = host.take_index(len(sources), by_transfer=True)
            tiers.quotas.own_many(host, targets, tiers.device.copies.owners_of(sources))
            tiers.links.link_many(sources, targets)
            tiers.transfers.prepare(Route.SPILL, Purpose.SPILL, table, blocks, sources, targets.slots)
            below = slots.read(tiers.links.below)
            copies = SlotIndex(below[below > 0].astype(np.intp))
        table.retained = RetainedCopies(copies.slots, copies.read(host.versions.lives))
        return []

    def hold_sources(self, sources: Slots) -> None:
        """Keep DDR copies for a restore that this seal opens: the room for spills and reads comes from other copies."""
        self._tiers.quotas.hold_many(self._tiers.require_host(), sources)

    def restore(self, table: BlockTable, blocks: Slots, sources: Slots, targets: Slots) -> list[tuple[int, int]]:
        """Restore blocks whose DDR copies are held into slots that the table holds.

        Return the id of each transfer and how many of the blocks it carries, in order.
        """
        index = SlotIndex(sources)
        self._tiers.device.hold_many(targets, by_transfer=True)
        # Other sequences that wait for these blocks learn that the blocks are on their way.
        self._tiers.require_host().versions.change_many(index)
        return self._tiers.transfers.prepare(Route.RESTORE, Purpose.RESTORE, table, blocks, index, targets)

    def settle_retention(self, table: BlockTable) -> None:
        """Keep the copies that were kept for a sequence, which does not wait any more, as any used copy."""
        tiers = self._tiers
        if len((wanted := table.fetch.wanted()).slots):
            demote(tiers.gateway, wanted, RetentionClass.WANTED, tiers.links if tiers.host is not None else None)
        if tiers.host is not None and len(table.retained.slots):
            demote(tiers.host, table.retained, RetentionClass.PREEMPTED, tiers.links)
        table.retained = NO_COPIES

    # ---- landings

    def note_fetched(self, table: BlockTable) -> None:
        """Count a block that came up from the disk for a waiting sequence. If DDR lies between, its restore counts."""
        if not table.was_preempted:
            table.num_fetched += 1
        elif self._tiers.host is None:
            table.num_swapped += 1
            self.swapped_blocks += 1

    def note_restored(self, table: BlockTable, blocks: int) -> None:
        """Count blocks that came up from DDR for an admitted sequence."""
        if not table.was_preempted:
            table.num_loaded += blocks
        else:
            table.num_swapped += blocks
            self.swapped_blocks += blocks

    def land_restore(self, transfer: Transfer) -> None:
        """Release the DDR copies that a restore has read; each is a shadow from now on, or dropped without reuse."""
        host = self._tiers.require_host()
        sources = SlotIndex(as_slots(transfer.sources))
        self._tiers.quotas.drop_many(host, sources)
        cached = sources.filter(sources.read(host.all_states) == SlotState.CACHED)
        if self._tiers.limits.has_reuse:
            host.copies.set_retention_many(cached, RetentionClass.SHADOW)
        else:
            host.evict_many(cached.slots)

    def retain_landed(self, transfer: Transfer, table: BlockTable | None) -> None:
        """Keep the landed copies that a preempted sequence still needs.

        Those are none if the sequence has ended or come back, and fewer if it was preempted again.
        """
        if table is None or table.is_closed or not len(table.retained.slots):
            return
        host, targets = self._tiers.require_host(), as_slots(transfer.targets)[::-1]
        is_named = SlotIndex(targets).read(host.slot_by_key.all_named) > 0
        is_needed = np.isin(targets, table.retained.slots) & is_named
        host.copies.set_retention_many(targets[is_needed], RetentionClass.PREEMPTED)

    def _on_device_eviction(self, key: BlockKey, slot: SlotId) -> None:
        """Do the same as `promote`, for one copy."""
        host, links, classes = self._tiers.require_host(), self._tiers.links, self._tiers.device.copies.classes
        below = links.lower_slot_of(slot) if links is not None else 0
        if below and host.copies.classes[below] == RetentionClass.SHADOW and host.slot_by_key.is_named[below]:
            is_reused = classes[slot] > RetentionClass.ONCE
            host.copies.set_retention(below, RetentionClass.REUSED if is_reused else RetentionClass.ONCE)
