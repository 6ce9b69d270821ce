"""How fair it was: service by weight over the last minute, of those that wanted service all the while."""

from collections import deque
from collections.abc import Iterable, Mapping

from tiercel.ids import TenantId

_SAMPLE_S = 5.0
_SAMPLES = 13  # a minute


class ServiceWindow:
    """Samples of what each tenant was served, and who waited then."""

    def __init__(self) -> None:
        self._samples: deque[tuple[dict[TenantId, float], frozenset[TenantId]]] = deque(maxlen=_SAMPLES)
        self._sampled_s = float("-inf")

    def note(self, served_ms: Mapping[TenantId, float], waiting: Iterable[TenantId], now_s: float) -> None:
        """Take a sample, if the last one is old enough."""
        if now_s - self._sampled_s >= _SAMPLE_S:
            self._sampled_s = now_s
            self._samples.append((dict(served_ms), frozenset(waiting)))

    def per_weight_ms(self, weights: Mapping[TenantId, float]) -> dict[TenantId, float]:
        """Milliseconds per weight within the window; only of tenants that waited in every sample."""
        if len(self._samples) < 2:
            return {}
        always = frozenset[TenantId].intersection(*(waiting for _, waiting in self._samples))
        first, last = self._samples[0][0], self._samples[-1][0]
        return {
            tenant: (last.get(tenant, 0.0) - first.get(tenant, 0.0)) / weights.get(tenant, 1.0) for tenant in always
        }

    def jain(self, weights: Mapping[TenantId, float]) -> float:
        """Jain's index: 1 when all got the same by weight, 1/n when one got all. 1 when fewer than two waited."""
        shares = list(self.per_weight_ms(weights).values())
        squares = sum(share * share for share in shares)
        return sum(shares) ** 2 / (len(shares) * squares) if len(shares) > 1 and squares else 1.0

    def gap_ms(self, weights: Mapping[TenantId, float]) -> float:
        """The largest difference of service per weight."""
        shares = self.per_weight_ms(weights).values()
        return max(shares) - min(shares) if len(shares) > 1 else 0.0
