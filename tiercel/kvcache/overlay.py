"""References that a plan would add and take away, by slot of the device tier."""

from array import array

import numpy as np

from tiercel.kvcache.pool import SlotPool
from tiercel.kvcache.slot_index import MIN_NUMPY_SLOTS, SlotIndex, view
from tiercel.kvcache.slot_state import SlotState

_CACHED, _OWNED = int(SlotState.CACHED), int(SlotState.OWNED)


class Overlay:
    """The changes of references by one plan at a time. Its arrays are as long as the pool and are used again."""

    def __init__(self, pool: SlotPool) -> None:
        slots = pool.blocks + 1
        self.available = 0  # blocks that the plan can still take
        self.coming = 0  # blocks that are free for a later plan
        self._pool = pool
        self._changes, self._last_steps = array("i", bytes(4 * slots)), array("q", bytes(8 * slots))
        self._spilled = bytearray(slots)
        self._all_changes, self._all_last_steps = view(self._changes), view(self._last_steps)
        self._all_spilled = view(self._spilled)
        self._touched: list[int] = []
        self._touched_many: list[SlotIndex] = []
        self._given: SlotIndex | None = None  # hits that are counted, and not written to the arrays yet
        self._given_counts = (0, 0)
        self._has_losers = False  # a table has given something up

    def begin(self, available: int, coming: int) -> None:
        """Begin a plan: nothing is changed so far."""
        for slot in self._touched:
            self._changes[slot] = self._last_steps[slot] = self._spilled[slot] = 0
        for index in self._touched_many:
            index.write(self._all_changes, 0)
            index.write(self._all_last_steps, 0)
            index.write(self._all_spilled, 0)
        self._touched.clear()
        self._touched_many.clear()
        self._given = None
        self._has_losers = False
        self.available, self.coming = available, coming

    def take(self, blocks: int) -> None:
        """Take blocks whose slots are not known yet; a negative number gives them back."""
        self.available -= blocks

    def spill(self, index: SlotIndex) -> None:
        """Note that copies of these slots go down before the slots are free."""
        index.write(self._all_spilled, 1)
        self._touched_many.append(index)

    def give(self, index: SlotIndex) -> None:
        """Count slots that a table would hold.

        As long as no table has given anything up, the slots are counted only, and written when something else changes:
        most of these tables are given their slots in vain.
        """
        pool = self._pool
        if len(index) < MIN_NUMPY_SLOTS or self._has_losers or pool.num_coming != pool.num_deferred:
            self.shift(index, 1, 0)
            return
        self._write_given()
        states = index.read(pool.all_states)
        is_new = states != _OWNED
        if self._touched_many or self._touched:
            is_new &= index.read(self._all_changes) == 0
        cached = int(np.count_nonzero(is_new & (states == _CACHED)))
        deferred = int(np.count_nonzero(is_new)) - cached
        self._given, self._given_counts = index, (cached, deferred)
        self.available -= cached
        self.coming -= deferred

    def take_back(self, index: SlotIndex) -> None:
        """Take back the slots that `give` gave to a table."""
        if self._given is index:
            self.available += self._given_counts[0]
            self.coming += self._given_counts[1]
            self._given = None
        else:
            self.shift(index, -1, 0)

    def shift(self, index: SlotIndex, change: int, last_step: int) -> None:
        """Count references, and whether a slot becomes held, coming or available by them."""
        self._write_given()
        self._has_losers |= change < 0
        pool = self._pool
        if len(index) < MIN_NUMPY_SLOTS:
            for slot in index.slots.tolist():
                self._shift(slot, change, last_step)
            return
        lent = index.read(pool.all_transfer_refs)
        before = index.read(pool.all_refs) - lent + index.read(self._all_changes)
        index.add(self._all_changes, change)
        last_steps = np.maximum(index.read(self._all_last_steps), last_step)
        index.write(self._all_last_steps, last_steps)
        self._touched_many.append(index)
        # The last table drops the slot, or the first one holds it: its block can be taken, or not any more.
        is_crossing = before == (0 if change > 0 else 1)
        is_busy = (lent > 0) | (index.read(self._all_spilled) > 0)
        is_busy |= np.maximum(index.read(pool.deferred.last_steps), last_steps) > pool.deferred.committed
        coming = int(np.count_nonzero(is_crossing & is_busy))
        self.coming -= change * coming
        self.available -= change * (int(np.count_nonzero(is_crossing)) - coming)

    def _write_given(self) -> None:
        """Write the given slots to the arrays, because something else changes."""
        if self._given is not None:
            self._given.add(self._all_changes, 1)
            self._touched_many.append(self._given)
            self._given = None

    def _shift(self, slot: int, change: int, last_step: int) -> None:
        pool, deferred = self._pool, self._pool.deferred
        lent = pool.transfer_refs[slot]
        before = pool.refs[slot] - lent + self._changes[slot]
        after = before + change
        self._changes[slot] += change
        self._last_steps[slot] = max(self._last_steps[slot], last_step)
        self._touched.append(slot)
        if before and after:
            return
        is_touched = max(deferred.last_step(slot), self._last_steps[slot]) > deferred.committed
        if lent or self._spilled[slot] or is_touched:
            self.coming -= change
        else:
            self.available -= change
