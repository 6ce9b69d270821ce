"""A histogram for percentiles of many values in little memory."""

import math

_RATIO = math.log(1.01)
_LEAST = 1e-6  # smaller values count as this


class LogHistogram:
    """Counts of values in buckets that are 1 % wide each."""

    __slots__ = ("count_by_bucket",)

    def __init__(self) -> None:
        self.count_by_bucket: dict[int, int] = {}  # may be updated from outside, see `bucket_of`

    @property
    def total(self) -> int:
        """Number of values."""
        return sum(self.count_by_bucket.values())

    def percentile(self, percent: float) -> float:
        """Return the value that `percent` of the values do not exceed, within 1 %; 0 without values."""
        wanted, seen = percent / 100 * self.total, 0
        for bucket in sorted(self.count_by_bucket):
            seen += self.count_by_bucket[bucket]
            if seen >= wanted:
                return _LEAST * math.exp(_RATIO * bucket)
        return 0.0

    def add_all(self, other: "LogHistogram") -> None:
        """Add the counts of another histogram."""
        mine = self.count_by_bucket
        for bucket, count in other.count_by_bucket.items():
            mine[bucket] = mine.get(bucket, 0) + count


def bucket_of(value: float) -> int:
    """Return the bucket of a value."""
    return max(0, round(math.log(max(value, _LEAST) / _LEAST) / _RATIO))
