"""A lane for copies that checks their order, in the place of the streams of a GPU."""

import threading

from torch import Tensor

from tiercel.engine.experts.host_store import UseMark


class NumberedMark:
    """A mark with its number."""

    def __init__(self, number: int) -> None:
        self.number = number


class CheckingLane:
    """A lane that knows for each slot the mark behind its last use, and fails if a copy does not wait for it."""

    def __init__(self) -> None:
        self.num_marks = 0
        self.needed_by_slot: dict[int, int] = {}
        self.slot_of: dict[int, int] = {}  # by address
        self.too_early: list[int] = []
        self.fails = False
        self._lock = threading.Lock()

    def mark(self) -> UseMark:
        with self._lock:
            self.num_marks += 1
            return NumberedMark(self.num_marks)

    def copy(self, source: Tensor, target: Tensor, after: UseMark | None) -> None:
        if self.fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        number = after.number if isinstance(after, NumberedMark) else 0
        slot = self.slot_of.get(target.data_ptr(), -1)
        with self._lock:
            if self.needed_by_slot.get(slot, 0) > number:
                self.too_early.append(slot)
        target[:] = source

    def use(self, slot: int) -> None:
        """Queue work that reads a slot: only a later mark is behind it."""
        with self._lock:
            self.needed_by_slot[slot] = self.num_marks + 1
