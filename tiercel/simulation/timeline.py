"""Samples over time of a simulation: service, waiting tenants, load of the engines."""

from collections.abc import Iterable, Sequence

from tiercel.simulation.simulator import Simulation
from tiercel.values.ids import TenantId

_SAMPLES = 360  # of a run that ends with its last arrival


class SimTimeline:
    """Samples at equal distances in time."""

    def __init__(self, engines: Sequence[Simulation], span_s: float) -> None:
        self.every_s = max(span_s / _SAMPLES, 0.1)
        self.next_s = 0.0
        self.at_s: list[float] = []
        self.served: list[dict[TenantId, float]] = []  # by tenant so far, in milliseconds
        self.waiting: list[dict[TenantId, float]] = []  # tenants that wait, and since when
        self.num_running: list[int] = []
        self.num_waiting: list[int] = []
        self.tokens: list[int] = []  # generated so far
        self.blocks_used: list[int] = []
        self._engines = engines

    def sample(self, now_s: float) -> None:
        """Take a sample. Cost: O(engines x tenants)."""
        engines = self._engines
        self.at_s.append(now_s)
        self.next_s = now_s + self.every_s
        self.served.append(_served(engines))
        self.waiting.append(_waiting(engines))
        self.num_running.append(sum(len(engine.book.running) for engine in engines))
        self.num_waiting.append(sum(len(engine.book.waiting) for engine in engines))
        self.tokens.append(sum(engine.tally.tokens for engine in engines))
        self.blocks_used.append(sum(engine.cache.blocks_used for engine in engines))


def _served(engines: Sequence[Simulation]) -> dict[TenantId, float]:
    total: dict[TenantId, float] = {}
    for engine in engines:
        is_fair = engine.policy.name == "fair"
        served = engine.policy.fair.served_ms if is_fair else engine.machine.served_ms
        for tenant, ms in served.items():
            total[tenant] = total.get(tenant, 0.0) + ms
    return total


def _waiting(engines: Sequence[Simulation]) -> dict[TenantId, float]:
    earliest: dict[TenantId, float] = {}
    for engine in engines:
        for tenant, since_s in _waiting_at(engine):
            earliest[tenant] = min(earliest.get(tenant, since_s), since_s)
    return earliest


def _waiting_at(engine: Simulation) -> Iterable[tuple[TenantId, float]]:
    queue = engine.policy.queue
    if engine.policy.name == "fair":
        return queue.since_by_tenant().items()
    # other policies have no tenants
    return ((sequence.request.tenant, queue[seq].since_s) for seq, sequence in engine.book.waiting.items())
