"""References that a plan would add and take away, by slot of the device tier."""

from array import array

import numpy as np

from tiercel.kvcache.pool import SlotPool, SlotState
from tiercel.kvcache.slot_index import MIN_NUMPY_SLOTS, SlotIndex, Slots, as_index, view

_CACHED, _OWNED = int(SlotState.CACHED), int(SlotState.OWNED)


class Overlay:
    """Changes of references for one plan at a time. Its arrays are as long as the pool and are used again."""

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
        self._given: Slots | None = None  # hits that are counted, and not written down yet
        self._given_index: slice | Slots = slice(0)
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

    def spill(self, index: SlotIndex) -> None:
        """Copies of these slots go down before the slots are free."""
        index.write(self._all_spilled, 1)
        self._touched_many.append(index)

    def give(self, slots: Slots, index: slice | Slots) -> None:
        """A table would hold these slots. While nobody has given anything up that is counted, not yet written down.

        `where` is the same as an index, which may be faster.
        """
        pool = self._pool
        if len(slots) < MIN_NUMPY_SLOTS or self._has_losers or pool.num_coming != pool.num_deferred:
            self.shift(slots, 1, 0)
            return
        self._write_given()
        states = pool.all_states[index]
        is_new = states != _OWNED
        if self._touched_many or self._touched:
            is_new &= self._all_changes[index] == 0
        cached = int(np.count_nonzero(is_new & (states == _CACHED)))
        deferred = int(np.count_nonzero(is_new)) - cached
        self._given, self._given_index, self._given_counts = slots, index, (cached, deferred)
        self.available -= cached
        self.coming -= deferred

    def take_back(self, slots: Slots) -> None:
        """The table that was given these slots gives them up again."""
        if self._given is slots:
            self.available += self._given_counts[0]
            self.coming += self._given_counts[1]
            self._given = None
        else:
            self.shift(slots, -1, 0)

    def shift(self, slots: Slots | SlotIndex, change: int, last_step: int) -> None:
        """Count references, and what they make of slots: held, coming, or free to take."""
        self._write_given()
        self._has_losers |= change < 0
        pool, index = self._pool, as_index(slots)
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
        # The last table goes or the first one comes: a block enters or leaves what can be taken.
        is_crossing = before == (0 if change > 0 else 1)
        is_busy = (lent > 0) | (index.read(self._all_spilled) > 0)
        is_busy |= np.maximum(index.read(pool.all_last_steps), last_steps) > pool.committed
        coming = int(np.count_nonzero(is_crossing & is_busy))
        self.coming -= change * coming
        self.available -= change * (int(np.count_nonzero(is_crossing)) - coming)

    def _write_given(self) -> None:
        """Something else changes: what was given is written down."""
        if self._given is not None:
            self._all_changes[self._given_index] += 1
            self._touched_many.append(SlotIndex(self._given))
            self._given = None

    def _shift(self, slot: int, change: int, last_step: int) -> None:
        pool = self._pool
        lent = pool.transfer_refs[slot]
        before = pool.refs[slot] - lent + self._changes[slot]
        after = before + change
        self._changes[slot] += change
        self._last_steps[slot] = max(self._last_steps[slot], last_step)
        self._touched.append(slot)
        if before and after:
            return
        if lent or self._spilled[slot] or max(pool.last_steps[slot], self._last_steps[slot]) > pool.committed:
            self.coming -= change
        else:
            self.available -= change
