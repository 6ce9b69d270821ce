"""Samples over time of a simulation: service, waiting tenants, load of the engine."""

from tiercel.ids import TenantId
from tiercel.simulation.simulator import Simulation

_SAMPLES = 360  # of a run that ends with its last arrival


class SimTimeline:
    """Samples at equal distances in time."""

    def __init__(self, simulation: Simulation, span_s: float) -> None:
        self.every_s = max(span_s / _SAMPLES, 0.1)
        self.next_s = 0.0
        self.at_s: list[float] = []
        self.served: list[dict[TenantId, float]] = []  # by tenant so far, in milliseconds
        self.waiting: list[dict[TenantId, float]] = []  # tenants that wait, and since when
        self.num_running: list[int] = []
        self.num_waiting: list[int] = []
        self.tokens: list[int] = []  # generated so far
        self.blocks_used: list[int] = []
        self._simulation = simulation

    def sample(self) -> None:
        """Take a sample now. Cost: O(tenants)."""
        simulation = self._simulation
        self.at_s.append(simulation.now_s)
        self.next_s = simulation.now_s + self.every_s
        self.served.append(self._served())
        self.waiting.append(self._waiting())
        self.num_running.append(len(simulation.book.running))
        self.num_waiting.append(len(simulation.book.waiting))
        self.tokens.append(simulation.tally.tokens)
        self.blocks_used.append(simulation.cache.blocks_used)

    def _served(self) -> dict[TenantId, float]:
        if self._simulation.policy.name == "fair":
            return dict(self._simulation.policy.fair.served_ms)
        return dict(self._simulation.machine.served_ms)

    def _waiting(self) -> dict[TenantId, float]:
        queue = self._simulation.policy.queue
        if self._simulation.policy.name == "fair":
            return queue.since_by_tenant()
        since: dict[TenantId, float] = {}  # other policies have no tenants
        for seq, sequence in self._simulation.book.waiting.items():
            tenant, since_s = sequence.request.tenant, queue[seq].since_s
            since[tenant] = min(since.get(tenant, since_s), since_s)
        return since
