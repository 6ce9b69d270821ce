"""The blocks of the device tier that a tenant's sequences hold: a block that several of them share counts once."""

from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from tiercel.kvcache.slot_index import MIN_NUMPY_SLOTS, SlotIndex, Slots, as_index, as_slots, view

_MAX_KEYS = 256  # slots that a dictionary counts; for more, an array over the tier is smaller and faster


class TableCounts:
    """A number of tables by slot, zero by default: a dictionary for a few slots, an array for many."""

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

    def counts_of(self, index: SlotIndex) -> Slots:
        """Return the counts of slots."""
        if self._many is None:
            slots = index.slots
            return np.fromiter((self._few.get(slot, 0) for slot in slots.tolist()), np.intp, len(slots))
        self._grow(index.slots)
        return index.read(self._all)

    def change(self, slot: int, change: int) -> int:
        """Add to the count of one slot. Return the count before."""
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

    def change_many(self, index: SlotIndex, change: int) -> Slots:
        """Add to the counts of slots. Return the counts before."""
        if self._many is None:
            self._spread()
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
        """Replace the dictionary by an array."""
        few, self._few, self._many = self._few, {}, array("i")
        self._grow(as_slots(few))
        for slot, count in few.items():
            self._many[slot] = count

    def _grow(self, slots: Slots) -> None:
        """Make the array long enough for these slots."""
        size = int(slots.max(initial=0)) + 1
        if self._many is not None and size > len(self._many):
            grown = array("i", bytes(4 * max(size, 2 * len(self._many))))
            grown[: len(self._many)] = self._many
            self._many, self._all = grown, view(grown)


class TenantHolding:
    """The slots in the tables of one tenant, and its quota. The tables write the slots, the OwnerBook the quota."""

    __slots__ = ("_num_slots", "_number", "_sizes", "_tables", "max_blocks")

    def __init__(self, sizes: "array[int] | None" = None, number: int = 0) -> None:
        """The holding keeps its size in `sizes[number]` too."""
        self._sizes = sizes
        self._number = number
        self.max_blocks: int | None = None  # None: no quota
        self._num_slots = 0
        self._tables = TableCounts()

    def __len__(self) -> int:
        return self._num_slots

    @property
    def tables(self) -> TableCounts:
        """The number of the tenant's tables that hold each slot."""
        return self._tables

    def add(self, slots: "Sequence[int] | Slots | SlotIndex") -> None:
        """Count slots that a table holds from now on."""
        if len(slots) >= MIN_NUMPY_SLOTS:
            before = self._tables.change_many(_index_of(slots), 1)
            self._num_slots += len(slots) - int(np.count_nonzero(before))
        else:
            for slot in _each(slots):
                self._num_slots += not self._tables.change(slot, 1)
        if self._sizes is not None:
            self._sizes[self._number] = self._num_slots

    def remove(self, slots: "Sequence[int] | Slots | SlotIndex") -> None:
        """Stop counting slots that a table does not hold any more."""
        if len(slots) >= MIN_NUMPY_SLOTS:
            before = self._tables.change_many(_index_of(slots), -1)
            self._num_slots -= int(np.count_nonzero(before == 1))
        else:
            for slot in _each(slots):
                self._num_slots -= self._tables.change(slot, -1) == 1
        if not self._num_slots:
            self._tables.clear()
        if self._sizes is not None:
            self._sizes[self._number] = self._num_slots

    def is_same(self, other: "TenantHolding") -> bool:
        """Return whether both count the same tables."""
        return self._tables.counts() == other._tables.counts() and len(self) == len(other)


class PlannedHolding:
    """The holding that a tenant would have if the plan were sealed now."""

    __slots__ = ("_changes", "_max_blocks", "_num_blocks", "_tables")

    def __init__(self, holding: TenantHolding, max_blocks: int) -> None:
        self._num_blocks = len(holding)
        self._max_blocks = max_blocks
        self._tables = holding.tables
        self._changes = TableCounts()

    @property
    def left(self) -> int:
        """Blocks that the tenant may still take; less than 0 if it would hold more than its quota."""
        return self._max_blocks - self._num_blocks

    def take(self, blocks: int) -> None:
        """Count blocks that a sequence would take, whose slots are not known yet; a negative number takes them back."""
        self._num_blocks += blocks

    def shift(self, slots: "Sequence[int] | Slots | SlotIndex", change: int) -> None:
        """Count that one table more (`change` 1) or less (-1) would hold each of these slots."""
        if len(slots) >= MIN_NUMPY_SLOTS:
            index = _index_of(slots)
            before = self._tables.counts_of(index) + self._changes.change_many(index, change)
            is_crossing = before == (0 if change > 0 else 1)
            self._num_blocks += change * int(np.count_nonzero(is_crossing))
            return
        for slot in _each(slots):
            before = self._tables.count(slot) + self._changes.change(slot, change)
            self._num_blocks += (before + change > 0) - (before > 0)


def _index_of(slots: "Sequence[int] | Slots | SlotIndex") -> SlotIndex:
    return slots if isinstance(slots, SlotIndex) else as_index(as_slots(slots))


def _each(slots: "Sequence[int] | Slots | SlotIndex") -> "Iterator[int]":
    if isinstance(slots, SlotIndex):
        return iter(slots.slots.tolist())
    return iter(slots.tolist() if isinstance(slots, np.ndarray) else slots)
