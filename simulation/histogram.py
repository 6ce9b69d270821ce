"""Percentiles of very many values in little room."""

import math

_RATIO = math.log(1.01)
_LEAST = 1e-6


class LogHistogram:
    """Counts by size, each bucket 1 % wide."""

    __slots__ = ("count_by_bucket",)

    def __init__(self) -> None:
        self.count_by_bucket: dict[int, int] = {}  # whoever has a bucket at hand may count there

    @property
    def total(self) -> int:
        """Values counted."""
        return sum(self.count_by_bucket.values())

    def percentile(self, percent: float) -> float:
        """So many percent of the values are at most this, within 1 %. 0 of nothing."""
        wanted, seen = percent / 100 * self.total, 0
        for bucket in sorted(self.count_by_bucket):
            seen += self.count_by_bucket[bucket]
            if seen >= wanted:
                return _LEAST * math.exp(_RATIO * bucket)
        return 0.0

    def add_all(self, other: "LogHistogram") -> None:
        """Everything that the other counted."""
        mine = self.count_by_bucket
        for bucket, count in other.count_by_bucket.items():
            mine[bucket] = mine.get(bucket, 0) + count


def bucket_of(value: float) -> int:
    """Where a value is counted."""
    return max(0, round(math.log(max(value, _LEAST) / _LEAST) / _RATIO))
