"""The number of preemptions since the start, by tenant, reason and mode."""

from collections.abc import Iterable

from tiercel.values.ids import TenantId
from tiercel.values.outcome import PreemptionCount, PreemptionKind
from tiercel.values.plan import PreemptionReason


class PreemptionCounts:
    """Preemptions by tenant, reason and mode. Written by the SequenceBook."""

    def __init__(self) -> None:
        self._counts_by_tenant: dict[TenantId, dict[tuple[PreemptionReason, PreemptionKind], int]] = {}
        self._counts: dict[tuple[PreemptionReason, PreemptionKind], int] = {}  # of all tenants

    @property
    def total(self) -> int:
        """All preemptions."""
        return sum(self._counts.values())

    @property
    def num_swaps(self) -> int:
        """The preemptions that kept the blocks in a lower tier."""
        return sum(count for (_, kind), count in self._counts.items() if kind == "swap")

    def by_reason(self) -> dict[PreemptionReason, int]:
        """Return the preemptions of all tenants by reason."""
        counts: dict[PreemptionReason, int] = {}
        for (reason, _), count in self._counts.items():
            counts[reason] = counts.get(reason, 0) + count
        return counts

    @property
    def tenants(self) -> Iterable[TenantId]:
        """The tenants whose sequences were preempted."""
        return self._counts_by_tenant.keys()

    def of_tenant(self, tenant: TenantId) -> tuple[PreemptionCount, ...]:
        """Return the tenant's counts that are not zero."""
        counts = self._counts_by_tenant.get(tenant)
        if counts is None:
            return ()
        return tuple(PreemptionCount(reason, kind, count) for (reason, kind), count in counts.items())

    def add(self, tenant: TenantId, reason: PreemptionReason, *, is_swap: bool) -> None:
        """Count one preemption of a sequence of the tenant."""
        key: tuple[PreemptionReason, PreemptionKind] = (reason, "swap" if is_swap else "recompute")
        for counts in (self._counts, self._counts_by_tenant.setdefault(tenant, {})):
            counts[key] = counts.get(key, 0) + 1
