"""Who gave way how often, since the start."""

from collections.abc import Iterable

from tiercel.ids import TenantId
from tiercel.outcome import PreemptionCount, PreemptionKind
from tiercel.plan import PreemptionReason


class PreemptionCounts:
    """Preemptions by tenant, reason and mode. Written by the SequenceBook."""

    def __init__(self) -> None:
        self._counts_by_tenant: dict[TenantId, dict[tuple[PreemptionReason, PreemptionKind], int]] = {}

    @property
    def tenants(self) -> Iterable[TenantId]:
        """Those whose sequences have given way."""
        return self._counts_by_tenant.keys()

    def of(self, tenant: TenantId) -> tuple[PreemptionCount, ...]:
        """The tenant's counts that are not zero."""
        counts = self._counts_by_tenant.get(tenant)
        if counts is None:
            return ()
        return tuple(PreemptionCount(reason, mode, count) for (reason, mode), count in counts.items())

    def add(self, tenant: TenantId, reason: PreemptionReason, *, is_swap: bool) -> None:
        """A sequence of the tenant gives way."""
        counts = self._counts_by_tenant.setdefault(tenant, {})
        kind: tuple[PreemptionReason, PreemptionKind] = (reason, "swap" if is_swap else "recompute")
        counts[kind] = counts.get(kind, 0) + 1
