"""Many slots at once: arrays of slot numbers, and views of the books' arrays that numpy can index.

The books stay plain arrays, because one element costs 30 ns there and 100 ns in numpy. An operation on at least
`FEW` slots goes through a view of the same memory (docs/decisions/0019-numpy-in-the-cache-books.md).
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.intp]
"""Slot numbers, or block numbers, in order. No number occurs twice."""

MIN_NUMPY_SLOTS = 32
"""Below so many slots a loop is faster than numpy, whose calls cost about 1 us each."""

_MIN_SLICED = 4096
"""Below so many slots the look for runs costs more than an array of indices: 2 us to read 1,024 elements."""

_MIN_RUN = 256
"""Below so many slots a run an array of indices is faster than a slice for each."""

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


class SlotIndex:
    """Slots as an index into the books' arrays: slices where the slots lie in a few runs, as those of long tables do.

    Numpy reads and writes 65,536 elements through a slice in 2 to 15 us, and through an array of indices in 70 to 120.
    """

    __slots__ = ("_runs", "slots")

    def __init__(self, slots: Slots) -> None:
        """Cost: one look at the slots, about 40 us for 65,536 of them."""
        self.slots = slots
        self._runs: list[tuple[int, int, slice]] | None = _slices(slots)

    def __len__(self) -> int:
        return len(self.slots)

    @classmethod
    def _made(cls, slots: Slots, runs: list[tuple[int, int, slice]] | None) -> "SlotIndex":
        made = cls.__new__(cls)
        made.slots, made._runs = slots, runs
        return made

    def head(self, count: int) -> "SlotIndex":
        """Return the first of the slots. Cost: O(runs)."""
        if count >= len(self.slots):
            return self
        if self._runs is None:
            return SlotIndex._made(self.slots[:count], None)
        runs = [run for run in self._runs if run[1] <= count]
        done = runs[-1][1] if runs else 0
        if done < count:
            step = self._runs[len(runs)][2].step
            runs.append((done, count, _run(int(self.slots[done]), int(self.slots[count - 1]), step)))
        return SlotIndex._made(self.slots[:count], runs or None)

    def backwards(self) -> "SlotIndex":
        """Return the same slots, the last one first. Cost: O(runs)."""
        slots, size, runs = self.slots[::-1], len(self.slots), self._runs
        if runs is not None:
            runs = [
                (size - end, size - first, _run(int(self.slots[end - 1]), int(self.slots[first]), -run.step))
                for first, end, run in reversed(runs)
            ]
        return SlotIndex._made(slots, runs)

    def pick(self, places: Slots) -> "SlotIndex":
        """Return the slots at these places, which count up."""
        if len(places) and places[-1] == len(places) - 1:
            return self.head(len(places))
        return SlotIndex(self.slots[places])

    def filter(self, is_chosen: npt.NDArray[np.bool_]) -> "SlotIndex":
        """Return the slots for which this is true."""
        return self if is_chosen.all() else SlotIndex(self.slots[is_chosen])

    def read(self, book: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a copy of the slots' elements, in order."""
        if self._runs is None:
            return book[self.slots]
        if len(self._runs) == 1:
            return book[self._runs[0][2]].copy()
        return np.concatenate([book[run] for _, _, run in self._runs])

    def write(self, book: npt.NDArray[Any], values: npt.NDArray[Any] | int) -> None:
        """Set the slots' elements, all to one value or each to its own."""
        if self._runs is None:
            book[self.slots] = values
            return
        for first, end, run in self._runs:
            book[run] = values[first:end] if isinstance(values, np.ndarray) else values

    def add(self, book: npt.NDArray[Any], change: int) -> None:
        """Add a number to each of the slots' elements."""
        if self._runs is None:
            book[self.slots] += change
            return
        for _, _, run in self._runs:
            book[run] += change

    def items_of(self, items: Sequence[_Item]) -> list[_Item]:
        """Return the slots' items of a list, in order."""
        if self._runs is None:
            return [items[slot] for slot in self.slots.tolist()]
        return [item for _, _, run in self._runs for item in items[run]]


def as_index(slots: Slots | SlotIndex) -> SlotIndex:
    """Return the slots as an index. A function that takes either spares its callers a second look at the slots."""
    return slots if isinstance(slots, SlotIndex) else SlotIndex(slots)


def _slices(slots: Slots) -> list[tuple[int, int, slice]] | None:
    """Return the runs of slots that count up or down evenly: first position, end, slice. None if there are many."""
    if len(slots) < _MIN_SLICED:
        return None
    steps = slots[1:] - slots[:-1]
    changes = np.flatnonzero(steps[1:] != steps[:-1]) + 1
    if len(changes) > 2 + len(slots) // _MIN_RUN:
        return None
    found: list[tuple[int, int, slice]] = []
    done = 0  # elements before this one are in a run
    for first, end in pairwise((0, *changes.tolist(), len(steps))):
        # Elements `first` to `end` are evenly spaced; the one before may be the last of a run that ended there.
        if done > first and end == first + 1:
            continue  # a jump: the element behind it begins the next run
        if not steps[first]:
            return None  # the same number again, as of slots that stand for nothing
        found.append((done, end + 1, _run(int(slots[done]), int(slots[end]), int(steps[first]))))
        done = end + 1
    if done < len(slots):
        found.append((done, len(slots), _run(int(slots[done]), int(slots[done]), 1)))
    return found


def _run(first: int, last: int, step: int) -> slice:
    end = last + step
    return slice(first, None if end < 0 else end, step)


def count_each(numbers: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """Return which small numbers occur and how often, in order. Cost: little when there is but one."""
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
