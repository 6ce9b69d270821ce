"""The service of tenants over all engines, and the weights with which each engine balances it."""

import math
from collections.abc import Collection, Mapping

from tiercel.values.errors import InvariantError
from tiercel.values.ids import EngineId, TenantId

LEAD_S = 4.0
"""The time constant T of the correction: of two tenants, the one that is T seconds of service further ahead of its
share has its weight divided by e.

An engine follows a new weight only as running answers end, one to two seconds later. With a T below that delay the
shares swing between nothing and twice the share and never settle.
"""

MAX_LEAD_S = 1.5
"""The largest difference between the leads of two tenants. A tenant that its engines cannot give its share would
otherwise save up a claim without a limit."""

_ROUNDS = 6
"""Rounds of the search for even weights. Each of them reduces the excess of a tenant at least to its square root."""

MOST_FACTOR = 16.0
"""The largest factor by which a weight is multiplied or divided. Beside another tenant, a weight counts for at least
1 / (16 * 16) of itself."""


class FleetAccount:
    """The service that each tenant has had over all engines, and the weights that even it out.

    An engine keeps its own tenants fair by their weights. A tenant whose prefixes bind it to few engines gets less than
    its share over all of them, although each engine is fair. Here the *lead* of a tenant is its service over all
    engines, measured in seconds of its share of the whole fleet (its weight, among tenants with work). An engine uses
    the weight w * clamp(even * exp(-lead / T), 1/16, 16): `even`, found by `balance`, is what would give every tenant
    its share if engines obeyed at once, and the lead corrects what that leaves. The leads are counted from the middle
    between the first and the last of the tenants with work, because only the ratios of weights matter.

    A tenant that returns from idle has no lead below the last tenant with work: idle time is not saved up. Leads are at
    most 1.5 s apart: a tenant that is bound to too few engines for its share does not run up a claim, and
    one that was alone is not made to pay for more.

    Error: a report is late by up to its interval, in which a tenant may get its share of an engine by an old weight.
    Leads of tenants stay apart by T times the logarithm of what `even` misses; the rate
    of their service is even. Several fronts that hear the same engines find the same weights.
    """

    def __init__(self, lead_s: float = LEAD_S, most_factor: float = MOST_FACTOR) -> None:
        """Errors: InvariantError if `lead_s` is not positive or `most_factor` is less than 1."""
        if not lead_s > 0 or not most_factor >= 1:
            raise InvariantError("fleet_account.limits", lead_s=lead_s, most_factor=most_factor)
        self._lead_s = lead_s
        self._most_factor = most_factor
        self._span_s = MAX_LEAD_S
        self._weights: dict[TenantId, float] = {}
        self._counters: dict[EngineId, dict[TenantId, float]] = {}  # the last totals of each engine, milliseconds
        self._working: dict[EngineId, frozenset[TenantId]] = {}  # the tenants with work at each engine
        self._num_working: dict[TenantId, int] = {}  # engines where the tenant has work
        self._working_weight = 0.0
        self._even: dict[TenantId, float] = {}  # factor that evens out the tenants with work, by `balance`
        self._level_s: dict[TenantId, float] = {}  # service in seconds of the share, from an arbitrary zero
        self._served_ms: dict[TenantId, float] = {}

    @property
    def served_ms(self) -> Mapping[TenantId, float]:
        """Service of each tenant over all engines, those that have left included, in milliseconds of a device."""
        return self._served_ms

    def join(self, engine: EngineId) -> None:
        """Add an engine whose counters begin at 0. Errors: InvariantError if it is there already."""
        if engine in self._counters:
            raise InvariantError("fleet_account.joined", engine=engine)
        self._counters[engine] = {}
        self._working[engine] = frozenset()

    def leave(self, engine: EngineId) -> None:
        """Remove an engine, if it is there. Its service stays counted."""
        if engine in self._counters:
            self.note_work(engine, ())
            del self._counters[engine], self._working[engine]

    def set_weights(self, weights: Mapping[TenantId, float]) -> None:
        """Set the configured weights of all tenants; 1 for others. Leads stay.

        Errors: InvariantError if a weight is not a positive number.
        """
        if any(not 0 < weight < math.inf for weight in weights.values()):
            raise InvariantError("fleet_account.weight")
        self._weights = dict(weights)
        self._working_weight = sum(map(self.weight, self._num_working))

    def weight(self, tenant: TenantId) -> float:
        """Return the configured weight of a tenant."""
        return self._weights.get(tenant, 1.0)

    def note_work(self, engine: EngineId, tenants: Collection[TenantId]) -> None:
        """Set the tenants that have unfinished work at an engine. Unknown engines are ignored: they have left."""
        before = self._working.get(engine)
        if before is None:
            return
        now = self._working[engine] = frozenset(tenants)
        for tenant in sorted(now - before):
            if tenant not in self._num_working:
                self._enter(tenant)
            self._num_working[tenant] = self._num_working.get(tenant, 0) + 1
        for tenant in sorted(before - now):
            self._num_working[tenant] -= 1
            if not self._num_working[tenant]:
                del self._num_working[tenant]
                self._working_weight -= self.weight(tenant)
        if not self._num_working:
            self._working_weight = 0.0

    def note_service(self, engine: EngineId, total_ms_by_tenant: Mapping[TenantId, float]) -> None:
        """Take an engine's counters of service since its start, in milliseconds of its device.

        Lost reports cost nothing, because the counters are totals; tenants that are left out have had nothing since. A
        correction may make a total smaller. Unknown engines are ignored.
        """
        counters = self._counters.get(engine)
        if counters is None:
            return
        num_engines = len(self._counters)
        for tenant, total_ms in total_ms_by_tenant.items():
            ms = total_ms - counters.get(tenant, 0.0)
            if not ms:
                continue
            counters[tenant] = total_ms
            self._served_ms[tenant] = self._served_ms.get(tenant, 0.0) + ms
            weight = self.weight(tenant)
            share = weight / max(self._working_weight, weight)
            self._level_s[tenant] = self._level_s.get(tenant, 0.0) + ms / 1e3 / (num_engines * share)

    def balance(self) -> None:
        """Find the factors with which engines that obey weights at once would give every tenant its share.

        A tenant is expected to get, of each engine where it has work, its part by weight of one device. Its factor is
        multiplied by the root of its share over what it gets from all engines, a few times; the next call goes on from
        there. A tenant that its engines cannot give its share ends at the limit of the factor. Call it before the
        weights are read, whenever the engines have reported.

        Cost: O(pairs of an engine and a tenant with work there).
        """
        even = {tenant: self._even.get(tenant, 1.0) for tenant in self._num_working}
        busy = [tenants for tenants in self._working.values() if tenants]
        for _ in range(_ROUNDS if len(busy) > 1 else 0):
            weights = {tenant: self.weight(tenant) * factor for tenant, factor in even.items()}
            got = dict.fromkeys(even, 0.0)
            for tenants in busy:
                whole = sum(weights[tenant] for tenant in tenants)
                for tenant in tenants:
                    got[tenant] += weights[tenant] / whole
            for tenant in even:
                share = len(busy) * self.weight(tenant) / self._working_weight
                even[tenant] *= math.sqrt(share / got[tenant])
            middle = math.sqrt(min(even.values()) * max(even.values()))
            for tenant, factor in even.items():
                even[tenant] = min(max(factor / middle, 1 / self._most_factor), self._most_factor)
        self._even = even

    def effective_weights(self, engine: EngineId | None = None) -> dict[TenantId, float]:
        """Return the weights that an engine is to use for the tenants that have work there, or those of all with work.

        Cost: O(tenants with work).
        """
        if not self._num_working:
            return {}
        self._limit()
        levels = [self._level_s[tenant] for tenant in self._num_working]
        middle_s = (min(levels) + max(levels)) / 2
        chosen = self._num_working.keys() if engine is None else self._working.get(engine, ())
        return {
            tenant: self.weight(tenant) * self._factor(self._even.get(tenant, 1.0), self._level_s[tenant] - middle_s)
            for tenant in chosen
        }

    def lead_s(self, tenant: TenantId) -> float:
        """Return a tenant's lead over the last tenant with work, in seconds of its share; 0 if it has no work."""
        if tenant not in self._num_working:
            return 0.0
        return self._level_s[tenant] - min(self._level_s[other] for other in self._num_working)

    def forget_idle(self) -> None:
        """Forget the counts of tenants that are not configured and have no work, so that they do not pile up."""
        kept = self._num_working.keys() | self._weights.keys()
        for book in (self._level_s, self._served_ms):
            for tenant in [tenant for tenant in book if tenant not in kept]:
                del book[tenant]

    def _enter(self, tenant: TenantId) -> None:
        """Place a tenant that has work again between the last and the first of the others."""
        self._working_weight += self.weight(tenant)
        level_s = self._level_s.get(tenant, 0.0)
        if self._num_working:
            last_s = min(self._level_s[other] for other in self._num_working)
            level_s = min(max(level_s, last_s), last_s + self._span_s)
        self._level_s[tenant] = level_s

    def _limit(self) -> None:
        """Raise the tenants that are too far behind: more than the span would change no weight."""
        least_s = max(self._level_s[tenant] for tenant in self._num_working) - self._span_s
        for tenant in self._num_working:
            if self._level_s[tenant] < least_s:
                self._level_s[tenant] = least_s

    def _factor(self, even: float, lead_s: float) -> float:
        most = self._most_factor
        return min(max(even * math.exp(-lead_s / self._lead_s), 1 / most), most)
