"""What the sequences of one tenant hold of the device tier: a block that several share counts once."""

from array import array
from collections.abc import Sequence

import numpy as np

from tiercel.kvcache.slot_index import MIN_NUMPY_SLOTS, SlotIndex, Slots, as_index, as_slots, view

_MAX_KEYS = 256  # slots that a dictionary counts; beyond, an array over the tier is smaller and faster


class TableCounts:
    """A count for each slot that is not zero by default: a dictionary for a few slots, an array for many."""

    __slots__ = ("_all", "_few", "_many")

    def __init__(self) -> None:
        self._few: dict[int, int] = {}
        self._many: array[int] | None = None
        self._all = view(bytearray())  # of `_many`

    def count(self, slot: int) -> int:
        """Return the count of one slot."""
        if self._many is None:
            return self._few.get(slot, 0)
        return self._many[slot] if slot < len(self._many) else 0

    def counts_of(self, slots: Slots) -> Slots:
        """Return the counts of slots."""
        if self._many is None:
            return np.fromiter((self._few.get(slot, 0) for slot in slots.tolist()), np.intp, len(slots))
        self._grow(slots)
        return self._all[slots]

    def change(self, slot: int, change: int) -> int:
        """Add to the count of one slot. Returns what it was."""
        before = self.count(slot)
        if self._many is None:
            if before + change:
                self._few[slot] = before + change
            else:
                self._few.pop(slot, None)
            if len(self._few) > _MAX_KEYS:
                self._spread()
        else:
            if slot >= len(self._many):
                self._grow(np.array([slot]))
            self._many[slot] = before + change
        return before

    def change_many(self, slots: Slots | SlotIndex, change: int) -> Slots:
        """Add to the counts of slots, none of which occurs twice. Returns what they were."""
        if self._many is None:
            self._spread()
        index = as_index(slots)
        self._grow(index.slots)
        before = index.read(self._all)
        index.write(self._all, before + change)
        return before

    def clear(self) -> None:
        """Set every count to zero."""
        self._few.clear()
        self._many = None

    def counts(self) -> dict[int, int]:
        """Return all counts that are not zero, by slot."""
        if self._many is None:
            return dict(self._few)
        return {slot: count for slot, count in enumerate(self._many) if count}

    def _spread(self) -> None:
        """Go over to an array."""
        few, self._few, self._many = self._few, {}, array("i")
        self._grow(as_slots(few))
        for slot, count in few.items():
            self._many[slot] = count

    def _grow(self, slots: Slots) -> None:
        """Have room in the array for these slots."""
        size = int(slots.max(initial=0)) + 1
        if self._many is not None and size > len(self._many):
            grown = array("i", bytes(4 * max(size, 2 * len(self._many))))
            grown[: len(self._many)] = self._many
            self._many, self._all = grown, view(grown)


class TenantHolding:
    """Slots in the tables of one tenant. Written by those tables; its quota by the OwnerBook."""

    __slots__ = ("_num_slots", "_number", "_sizes", "_tables", "most_blocks")

    def __init__(self, sizes: "array[int] | None" = None, number: int = 0) -> None:
        """`sizes` is where its size is told, at `number`."""
        self._sizes = sizes
        self._number = number
        self.max_blocks: int | None = None  # the quota; None: as many as there are
        self._num_slots = 0
        self._tables = TableCounts()

    def __len__(self) -> int:
        return self._num_slots

    @property
    def tables(self) -> TableCounts:
        """How many tables of the tenant hold each slot."""
        return self._tables

    def add(self, slots: "Sequence[int] | Slots") -> None:
        """A table holds these slots from now on."""
        if len(slots) >= MIN_NUMPY_SLOTS:
            before = self._tables.change_many(as_slots(slots), 1)
            self._num_slots += len(slots) - int(np.count_nonzero(before))
        else:
            for slot in slots:
                self._num_slots += not self._tables.change(int(slot), 1)
        if self._sizes is not None:
            self._sizes[self._number] = self._num_slots

    def remove(self, slots: "Sequence[int] | Slots | SlotIndex") -> None:
        """A table does not hold these slots any more."""
        if len(slots) >= MIN_NUMPY_SLOTS:
            before = self._tables.change_many(slots if isinstance(slots, SlotIndex) else as_slots(slots), -1)
            self._num_slots -= int(np.count_nonzero(before == 1))
        else:
            for slot in slots.slots.tolist() if isinstance(slots, SlotIndex) else slots:
                self._num_slots -= self._tables.change(int(slot), -1) == 1
        if not self._num_slots:
            self._tables.clear()
        if self._sizes is not None:
            self._sizes[self._number] = self._num_slots

    def is_same(self, other: "TenantHolding") -> bool:
        """Both count the same tables."""
        return self._tables.counts() == other._tables.counts() and len(self) == len(other)


class PlannedHolding:
    """What a tenant would hold if the plan were sealed now."""

    __slots__ = ("_changes", "_tables", "blocks")

    def __init__(self, holding: TenantHolding) -> None:
        self.blocks = len(holding)  # the planner's takings, whose slots nobody knows yet, are added to it
        self._tables = holding.tables
        self._changes = TableCounts()

    def shift(self, slots: "Sequence[int] | Slots", change: int) -> None:
        """One table more or less (`change` is 1 or -1) would hold each of these slots."""
        if len(slots) >= MIN_NUMPY_SLOTS:
            many = as_slots(slots)
            before = self._tables.counts_of(many) + self._changes.change_many(many, change)
            crossing = before == (0 if change > 0 else 1)
            self.blocks += change * int(np.count_nonzero(crossing))
            return
        for slot in slots:
            before = self._tables.count(int(slot)) + self._changes.change(int(slot), change)
            self.blocks += (before + change > 0) - (before > 0)
