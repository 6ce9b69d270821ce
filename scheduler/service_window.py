"""How fair it was: service by weight over the last minute, of those that wanted service all the while."""

from collections import deque
from collections.abc import Collection, Iterable, Mapping

from tiercel.ids import TenantId

_SAMPLE_S = 5.0
_SAMPLES = 13  # a minute


class ServiceWindow:
    """Samples of what each tenant was served, and who waited from one to the next."""

    def __init__(self) -> None:
        self._samples: deque[tuple[dict[TenantId, float], frozenset[TenantId]]] = deque(maxlen=_SAMPLES)
        self._sampled_s = float("-inf")
        self._steady = frozenset[TenantId]()  # who waited whenever somebody looked since the last sample

    def note(self, served_ms: Mapping[TenantId, float], waiting: Iterable[TenantId], now_s: float) -> None:
        """Look who waits, and take a sample if the last one is old enough."""
        now = frozenset(waiting)
        self._steady &= now
        if now_s - self._sampled_s >= _SAMPLE_S:
            self._sampled_s = now_s
            self._samples.append((dict(served_ms), self._steady))
            self._steady = now

    def per_weight_ms(self, weights: Mapping[TenantId, float]) -> dict[TenantId, float]:
        """Milliseconds per weight of tenants that compete: that wait and have waited all the while.

        The while is as long as two did, up to a minute; nobody competes when there is no such while.
        """
        first = last = len(self._samples) - 1
        competing = self._steady
        while first > 0 and len(both := competing & self._samples[first][1]) > 1:
            competing = both
            first -= 1
        if first == last:
            return {}
        before, after = self._samples[first][0], self._samples[last][0]
        return {
            tenant: (after.get(tenant, 0.0) - before.get(tenant, 0.0)) / weights.get(tenant, 1.0)
            for tenant in competing
        }


def by_band(shares: Mapping[TenantId, float], bands: Mapping[TenantId, int]) -> list[list[float]]:
    """The shares of those that compete in one band; a band with one alone is left out."""
    found: dict[int, list[float]] = {}
    for tenant, share in shares.items():
        found.setdefault(bands.get(tenant, 0), []).append(share)
    return [shares for shares in found.values() if len(shares) > 1]


def jain(shares: Collection[float]) -> float:
    """Jain's index: 1 when all got the same, also nothing; 1/n when one of n got all."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def gap_ms(shares: Collection[float]) -> float:
    """The largest difference."""
    return max(shares) - min(shares)
