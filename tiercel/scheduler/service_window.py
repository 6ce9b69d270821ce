"""The evenness of service over the last minute among tenants that had waiting work all the time."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping

from tiercel.values.ids import TenantId

_SAMPLE_S = 5.0
_SAMPLES = 13  # a minute


class ServiceWindow:
    """Samples of the service of each tenant, and of the tenants that waited between two samples."""

    def __init__(self) -> None:
        self._samples: deque[tuple[dict[TenantId, float], frozenset[TenantId]]] = deque(maxlen=_SAMPLES)
        self._sampled_s = float("-inf")
        self._steady = frozenset[TenantId]()  # tenants that waited at every observation since the last sample

    def observe(self, served_ms: Mapping[TenantId, float], waiting: Iterable[TenantId], now_s: float) -> None:
        """Record which tenants wait, and take a sample if the last one is old enough."""
        now = frozenset(waiting)
        self._steady &= now
        if now_s - self._sampled_s >= _SAMPLE_S:
            self._sampled_s = now_s
            self._samples.append((dict(served_ms), self._steady))
            self._steady = now

    def per_weight_ms(self, weight_of: Callable[[TenantId], float]) -> dict[TenantId, float]:
        """Return the service per weight of the competing tenants, in milliseconds.

        The tenants compete that wait now and have waited during the longest part of the window in which at least two
        tenants did. The result is empty if there is no such part.
        """
        first = last = len(self._samples) - 1
        competing = self._steady
        while first > 0 and len(both := competing & self._samples[first][1]) > 1:
            competing = both
            first -= 1
        if first == last:
            return {}
        before, after = self._samples[first][0], self._samples[last][0]
        return {tenant: (after.get(tenant, 0.0) - before.get(tenant, 0.0)) / weight_of(tenant) for tenant in competing}


def by_band(shares: Mapping[TenantId, float], bands: Mapping[TenantId, int]) -> list[list[float]]:
    """Return the shares of the tenants that compete, band by band. Bands with a single tenant are left out."""
    shares_by_band: dict[int, list[float]] = {}
    for tenant, share in shares.items():
        shares_by_band.setdefault(bands.get(tenant, 0), []).append(share)
    return [shares for shares in shares_by_band.values() if len(shares) > 1]


def jain(shares: Collection[float]) -> float:
    """Return Jain's index: 1 if all shares are equal, 1/n if one of n tenants got everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def gap_ms(shares: Collection[float]) -> float:
    """Return the difference between the largest and the smallest share."""
    return max(shares) - min(shares)
