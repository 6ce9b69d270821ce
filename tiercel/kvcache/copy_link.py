"""Which slot of the device tier and which slot of the next tier hold the same block."""

from array import array

import numpy as np

from tiercel.kvcache.pool import SlotPool
from tiercel.kvcache.slot_index import SlotIndex, Slots, as_index, view
from tiercel.kvcache.transfers import TransferBook
from tiercel.values.errors import InvariantError
from tiercel.values.ids import BlockKey
from tiercel.values.tier import Tier


class CopyLinks:
    """For each block of the device tier its copy in the next tier, landed or on its way down; 0: none.

    With links blocks are spilled, their lower copies marked and their evictions noted by slot number, without a look
    at any key. A link is made when a slot gets its name or a copy sets off, and ends when either slot loses its copy.
    The pools tell of both.
    """

    def __init__(self, upper: SlotPool, lower: SlotPool, transfers: TransferBook, lower_tier: Tier) -> None:
        self._upper = upper
        self._lower = lower
        self._transfers = transfers
        self._lower_tier = lower_tier
        self._below, self._above = array("i", bytes(4 * (upper.blocks + 1))), array("i", bytes(4 * (lower.blocks + 1)))
        self.below, self.above = view(self._below), view(self._above)
        upper.on_name, upper.on_name_many = self._upper_named, self._uppers_named
        lower.on_name, lower.on_name_many = self._lower_named, self._lowers_named
        upper.on_free, upper.on_free_many = self._upper_freed, self._uppers_freed
        lower.on_free, lower.on_free_many = self._lower_freed, self._lowers_freed

    def lower_slot_of(self, slot: int) -> int:
        """Return the lower slot of one device slot; 0: the next tier neither has the block nor is about to."""
        return self._below[slot]

    def link(self, upper: int, lower: int) -> None:
        """Link two slots that hold the same block."""
        self._below[upper], self._above[lower] = lower, upper

    def link_many(self, uppers: Slots | SlotIndex, lowers: Slots | SlotIndex) -> None:
        """Link slots that hold the same blocks, pair by pair."""
        above, below = as_index(uppers), as_index(lowers)
        above.write(self.below, below.slots)
        below.write(self.above, above.slots)

    def link_restored(self, uppers: Slots, lowers: Slots) -> None:
        """Link slots, before they are named, to the copies that they were restored from.

        Copies that are gone, and copies of blocks that the device tier holds already, are left alone.
        """
        is_new = (self.above[lowers] == 0) & (self._lower.slot_by_key.all_named[lowers] > 0)
        self.link_many(uppers[is_new], lowers[is_new])

    def check(self) -> None:
        """Check that links join exactly the slots that hold the same block. Errors: InvariantError."""
        for key, upper in self._upper.slot_by_key.items():
            lower = self._lower.slot_by_key.get(key)
            if lower is None:
                lower = self._transfers.target(self._lower_tier, key)
            if lower is None and self._transfers.is_flying(self._lower_tier, key):
                lower = self._below[upper] or -1  # a spill: the link alone knows its target
            if self._below[upper] != (lower or 0):
                raise InvariantError("tiers.links", upper=upper, lower=lower, linked=self._below[upper])
        for lower in np.flatnonzero(self.above).tolist():
            upper, key = self._above[lower], self._lower.slot_by_key.key(lower)
            if self._upper.slot_by_key.key(upper) is None:
                raise InvariantError("tiers.links", upper=upper, lower=lower)
            if key is not None and self._upper.slot_by_key.get(key) != upper:
                raise InvariantError("tiers.links", upper=upper, lower=lower)
        for upper in np.flatnonzero(self.below).tolist():
            if self._upper.slot_by_key.key(upper) is None:
                raise InvariantError("tiers.links", upper=upper)

    # ---- called by the pools

    def _upper_named(self, key: BlockKey, slot: int) -> None:
        lower = self._lower.slot_by_key.get(key)
        if lower is not None:
            self._lower.versions.change(lower)  # a sequence that would load the block finds it in the device tier
        else:
            lower = self._transfers.target(self._lower_tier, key)
        if lower is not None:
            self.link(slot, lower)

    def _uppers_named(self, slots: Slots) -> None:
        below = SlotIndex(slots).read(self.below)
        is_linked = below > 0  # with the copies that they were restored from
        self._lower.versions.change_many(below[is_linked].astype(np.intp))
        for slot in slots[~is_linked].tolist():
            key = self._upper.key(slot)
            if key is not None:
                self._upper_named(key, slot)

    def _lower_named(self, key: BlockKey, slot: int) -> None:
        upper = self._upper.slot_by_key.get(key)
        if upper is not None:
            self.link(upper, slot)

    def _lowers_named(self, slots: Slots) -> None:
        is_linked = SlotIndex(slots).read(self.above) > 0  # since their copies set off
        for slot in slots[~is_linked].tolist():
            key = self._lower.key(slot)
            if key is not None:
                self._lower_named(key, slot)

    def _upper_freed(self, slot: int) -> None:
        lower = self._below[slot]
        if lower:
            self._below[slot] = 0
            self._above[lower] = 0

    def _uppers_freed(self, slots: Slots) -> None:
        index = SlotIndex(slots)
        self.above[index.read(self.below)] = 0  # slot 0, the null block, has no link
        index.write(self.below, 0)

    def _lower_freed(self, slot: int) -> None:
        upper = self._above[slot]
        if upper:
            self._above[slot] = 0
            if self._below[upper] == slot:
                self._below[upper] = 0

    def _lowers_freed(self, slots: Slots) -> None:
        uppers = SlotIndex(slots).read(self.above)
        linked, uppers = slots[uppers > 0], uppers[uppers > 0]
        self.above[linked] = 0
        self.below[uppers[self.below[uppers] == linked]] = 0
