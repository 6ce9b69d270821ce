"""Many slots at once: arrays of slot numbers, and views of the books' arrays that numpy can index.

The books stay plain arrays, because reading one element costs 30 ns there and 100 ns in numpy. An operation on at least
`MIN_NUMPY_SLOTS` slots goes through a view of the same memory (docs/decisions/0019-numpy-in-the-cache-books.md).
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.intp]
"""Slot numbers, or block numbers, in order. No number occurs twice."""

MIN_NUMPY_SLOTS = 32
"""For fewer slots a loop is faster than numpy, whose calls cost about 1 us each."""

_MIN_SLICED_SLOTS = 4096
"""For fewer slots the search for runs costs more than one read through an array of indices: 2 us for 1,024."""

_MIN_MEAN_RUN = 512
"""If the runs are shorter than this on average, one array of indices is faster than a slice for each run."""

_Item = TypeVar("_Item")

NO_SLOTS: Slots = np.empty(0, np.intp)


def as_slots(slots: Iterable[int]) -> Slots:
    """Copy slot numbers into an array that numpy can index with."""
    if isinstance(slots, np.ndarray):
        return slots.astype(np.intp, copy=False)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if isinstance(slots, array):
        # The copy matters: while a view exists the array cannot grow.
        return np.frombuffer(slots, np.dtype(slots.typecode)).astype(np.intp) if slots else NO_SLOTS
    return np.fromiter(slots, np.intp)


class _Run(NamedTuple):
    """Slots at positions [first, end) of an index that count up or down evenly, as a slice of a book."""

    first: int
    end: int
    slice: slice


class SlotIndex:
    """Slots as an index into the books' arrays: slices if the slots lie in a few runs, as those of long tables do.

    Numpy reads and writes 65,536 elements through a slice in 2 to 15 us, and through an array of indices in 70 to 120.
    """

    __slots__ = ("_runs", "slots")

    def __init__(self, slots: Slots, *, is_kept: bool = False) -> None:
        """Make an index of these slots. Cost: one look at the slots, about 40 us for 65,536 of them.

        With `is_kept` the index is used again and again, so that the search for runs pays from `MIN_NUMPY_SLOTS` on.
        """
        self.slots = slots
        self._runs = _find_runs(slots) if len(slots) >= (MIN_NUMPY_SLOTS if is_kept else _MIN_SLICED_SLOTS) else None

    def __len__(self) -> int:
        return len(self.slots)

    @classmethod
    def _of_runs(cls, slots: Slots, runs: list[_Run] | None) -> "SlotIndex":
        index = cls.__new__(cls)
        index.slots, index._runs = slots, runs
        return index

    def head(self, count: int) -> "SlotIndex":
        """Return the first `count` slots. Cost: O(runs)."""
        if count >= len(self.slots):
            return self
        if self._runs is None:
            return SlotIndex._of_runs(self.slots[:count], None)
        runs = [run for run in self._runs if run.end <= count]
        done = runs[-1].end if runs else 0
        if done < count:
            step = self._runs[len(runs)].slice.step
            runs.append(_Run(done, count, _slice(int(self.slots[done]), int(self.slots[count - 1]), step)))
        return SlotIndex._of_runs(self.slots[:count], runs or None)

    def backwards(self) -> "SlotIndex":
        """Return the same slots in reverse order. Cost: O(runs)."""
        slots, size, runs = self.slots[::-1], len(self.slots), self._runs
        if runs is not None:
            runs = [
                _Run(size - end, size - first, _slice(int(self.slots[end - 1]), int(self.slots[first]), -part.step))
                for first, end, part in reversed(runs)
            ]
        return SlotIndex._of_runs(slots, runs)

    def pick(self, positions: Slots) -> "SlotIndex":
        """Return the slots at these positions, which count up."""
        if len(positions) and positions[-1] == len(positions) - 1:
            return self.head(len(positions))
        return SlotIndex(self.slots[positions])

    def filter(self, is_chosen: npt.NDArray[np.bool_]) -> "SlotIndex":
        """Return the slots for which `is_chosen` is true."""
        return self if is_chosen.all() else SlotIndex(self.slots[is_chosen])

    def read(self, book: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a copy of the slots' elements, in order."""
        if self._runs is None:
            return book[self.slots]
        if len(self._runs) == 1:
            return book[self._runs[0].slice].copy()
        return np.concatenate([book[run.slice] for run in self._runs])

    def write(self, book: npt.NDArray[Any], values: npt.NDArray[Any] | int) -> None:
        """Set the slots' elements, all to one value or each to its own."""
        if self._runs is None:
            book[self.slots] = values
            return
        for first, end, part in self._runs:
            book[part] = values[first:end] if isinstance(values, np.ndarray) else values

    def add(self, book: npt.NDArray[Any], change: int) -> None:
        """Add a number to each of the slots' elements."""
        if self._runs is None:
            book[self.slots] += change
            return
        for run in self._runs:
            book[run.slice] += change

    def items_of(self, items: Sequence[_Item]) -> list[_Item]:
        """Return the slots' items of a list, in order."""
        if self._runs is None:
            return [items[slot] for slot in self.slots.tolist()]
        return [item for run in self._runs for item in items[run.slice]]


def as_index(slots: Slots | SlotIndex) -> SlotIndex:
    """Return the slots as an index. A function that takes either form spares its callers a second search for runs."""
    return slots if isinstance(slots, SlotIndex) else SlotIndex(slots)


def _find_runs(slots: Slots) -> list[_Run] | None:
    """Return the runs of slots that count up or down evenly, or None if the slots lie in many short runs."""
    steps = slots[1:] - slots[:-1]
    # Steps [begin, end) of the stretches between two borders are equal. Two runs are parted by a stretch of one step,
    # the jump between them: n runs have 2 * (n - 1) borders.
    borders = np.flatnonzero(steps[1:] != steps[:-1]) + 1
    if len(borders) > 2 + 2 * len(slots) // _MIN_MEAN_RUN:
        return None
    runs: list[_Run] = []
    done = 0  # the positions before are in a run
    for begin, end in pairwise((0, *borders.tolist(), len(steps))):
        # Positions `begin` to `end` are evenly spaced. Position `begin` may already be the last one of another run.
        is_jump = begin < done and end == begin + 1
        if is_jump:
            continue
        if not steps[begin]:
            return None  # a number occurs twice: null blocks, which stand for nothing
        runs.append(_Run(done, end + 1, _slice(int(slots[done]), int(slots[end]), int(steps[begin]))))
        done = end + 1
    if done < len(slots):  # one slot alone at the end
        runs.append(_Run(done, len(slots), _slice(int(slots[done]), int(slots[done]), 1)))
    return runs


def _slice(first: int, last: int, step: int) -> slice:
    end = last + step
    return slice(first, None if end < 0 else end, step)


def count_each(numbers: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """Return which small numbers occur and how often, in order. Cost: little if all are equal."""
    if not len(numbers):
        return []
    least = int(numbers.min())
    if least == int(numbers.max()):
        return [(least, len(numbers))]
    counts = np.bincount(numbers)
    return [(number, int(counts[number])) for number in np.flatnonzero(counts).tolist()]


def view(book: "array[int] | bytearray") -> npt.NDArray[Any]:
    """Return a writable view of a book's memory. The book must never grow or shrink again."""
    return np.frombuffer(book, np.uint8 if isinstance(book, bytearray) else np.dtype(book.typecode))
