"""Many slots at once: arrays of slot numbers, and views of the books' arrays that numpy can index.

The books stay plain arrays, because one element costs 30 ns there and 100 ns in numpy. An operation on at least
`FEW` slots goes through a view of the same memory (docs/decisions/0019-numpy-in-the-cache-books.md).
"""

from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.intp]
"""Slot numbers, or block numbers, in order. No number occurs twice."""

FEW = 32
"""Below so many slots a loop is faster than numpy, whose calls cost about 1 us each."""

NO_SLOTS: Slots = np.empty(0, np.intp)


def as_slots(slots: Iterable[int]) -> Slots:
    """Copy slot numbers into an array that numpy can index with."""
    if isinstance(slots, np.ndarray):
        return slots.astype(np.intp, copy=False)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if isinstance(slots, array):
        # The copy matters: while a view exists the array cannot grow.
        return np.frombuffer(slots, np.dtype(slots.typecode)).astype(np.intp) if slots else NO_SLOTS
    return np.fromiter(slots, np.intp)


def view(book: "array[int] | bytearray") -> npt.NDArray[Any]:
    """Return a writable view of a book's memory. The book must never grow or shrink again."""
    return np.frombuffer(book, np.uint8 if isinstance(book, bytearray) else np.dtype(book.typecode))
