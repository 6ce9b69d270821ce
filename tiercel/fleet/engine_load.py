"""The unfinished work of one engine by tenant, and how much of it is ahead of a tenant's next request."""

import math
from collections.abc import Collection

from tiercel.values.ids import TenantId
from tiercel.values.rates import EngineSpeed


class _Level:
    """The tenants whose work by weight lies between two powers of 2 milliseconds."""

    __slots__ = ("count", "ms", "weight")

    def __init__(self) -> None:
        self.ms = 0.0
        self.weight = 0.0
        self.count = 0


class EngineLoad:
    """The unfinished work at one engine, in predicted milliseconds of its device.

    Tenants are grouped by their work per weight in powers of 2, so that a prediction does not visit every tenant.
    """

    def __init__(self, speed: EngineSpeed) -> None:
        self.speed = speed
        self.total_ms = 0.0
        self._ms_by_tenant: dict[TenantId, float] = {}
        self._weight_by_tenant: dict[TenantId, float] = {}
        self._levels: dict[int, _Level] = {}

    @property
    def tenants(self) -> Collection[TenantId]:
        """The tenants with work."""
        return self._ms_by_tenant.keys()

    def of(self, tenant: TenantId) -> float:
        """Return the unfinished work of a tenant."""
        return self._ms_by_tenant.get(tenant, 0.0)

    def add(self, tenant: TenantId, weight: float, ms: float) -> None:
        """Add work to a tenant, or take it away. `weight` replaces the weight that the tenant had here."""
        before_ms = self._ms_by_tenant.get(tenant, 0.0)
        if tenant in self._ms_by_tenant:
            self._move(before_ms, self._weight_by_tenant[tenant], -1)
        after_ms = before_ms + ms
        if after_ms > 1e-6:  # less is the rounding of floats
            self._ms_by_tenant[tenant] = after_ms
            self._weight_by_tenant[tenant] = weight
            self._move(after_ms, weight, 1)
            self.total_ms += after_ms - before_ms
        else:
            self._ms_by_tenant.pop(tenant, None)
            self._weight_by_tenant.pop(tenant, None)
            self.total_ms = self.total_ms - before_ms if self._ms_by_tenant else 0.0

    def ahead_ms(self, tenant: TenantId, weight: float, prompt_ms: float) -> float:
        """Return the milliseconds after which the engine has computed everything ahead of a prompt of the tenant.

        Ahead is the tenant's own work, and of each other tenant's work as much as the engine gives that tenant, by
        weight, while it does the own work and the prompt. The prompt itself is not counted.

        Error: the work of others is overestimated by at most half, because tenants with up to twice the work by weight
        count as one. Cost: O(log of the largest work by weight), at most 30.
        """
        own_ms = self._ms_by_tenant.get(tenant, 0.0)
        turn_ms = (own_ms + prompt_ms) / weight  # service by weight
        own_level = _level(own_ms / self._weight_by_tenant[tenant]) if own_ms else -1
        ahead_ms = own_ms
        for number, level in self._levels.items():
            ms, others = level.ms, level.weight
            if number == own_level:
                ms, others = ms - own_ms, others - self._weight_by_tenant[tenant]
            ahead_ms += min(ms, others * turn_ms)
        return ahead_ms

    def _move(self, ms: float, weight: float, sign: int) -> None:
        number = _level(ms / weight)
        level = self._levels.get(number)
        if level is None:
            level = self._levels[number] = _Level()
        level.ms += sign * ms
        level.weight += sign * weight
        level.count += sign
        if not level.count:
            del self._levels[number]


def _level(ms_by_weight: float) -> int:
    return min(max(math.frexp(ms_by_weight)[1], 0), 30)
