"""The gauges of fairness: service, waiting times and preemptions, tenant by tenant."""

from collections.abc import Iterator, Mapping

from tiercel.scheduler.preemption_counts import PreemptionCounts
from tiercel.scheduler.queue import WaitingQueue
from tiercel.scheduler.service_window import ServiceWindow, by_band, gap_ms, jain
from tiercel.values.ids import TenantId
from tiercel.values.outcome import FairGauges, TenantGauges
from tiercel.values.tenant import TenantShare

_TENANTS_AT_ONCE = 512


class ServiceSurvey:
    """Collects the gauges of fairness. Remembers the service of the last minute."""

    def __init__(self) -> None:
        self._window = ServiceWindow()

    def pieces(
        self, queue: WaitingQueue, served_ms: Mapping[TenantId, float], shares: Mapping[TenantId, TenantShare],
        counts: PreemptionCounts, now_s: float,
    ) -> Iterator[FairGauges | None]:  # fmt: skip
        """Collect the gauges in pieces of about 1 ms. Yield None after every piece but the last, then the gauges."""
        since: dict[TenantId, float] = {}
        for number, (tenant, since_s) in enumerate(queue.oldest_by_account(), 1):
            since[tenant] = min(since.get(tenant, since_s), since_s)
            if number % _TENANTS_AT_ONCE == 0:
                yield None
        self._window.observe(served_ms, since, now_s)
        yield None
        competing = self._window.per_weight_ms(lambda tenant: shares[tenant].weight if tenant in shares else 1.0)
        yield None
        rivals = by_band(competing, {tenant: shares[tenant].band for tenant in competing if tenant in shares})
        worst, largest_ms = min(map(jain, rivals), default=None), max(map(gap_ms, rivals), default=None)
        yield None
        gauges: list[TenantGauges] = []
        for number, tenant in enumerate(dict.fromkeys((*served_ms, *since, *counts.tenants)), 1):
            gauges.append(
                TenantGauges(
                    tenant=tenant,
                    service_s=served_ms.get(tenant, 0.0) / 1e3,
                    starving_s=max(0.0, now_s - since.get(tenant, now_s)),
                    preemptions=counts.of_tenant(tenant),
                )
            )
            if number % _TENANTS_AT_ONCE == 0:
                yield None
        yield FairGauges(
            competing=sum(map(len, rivals)),
            jain=worst,
            gap_s=None if largest_ms is None else largest_ms / 1e3,
            tenants=tuple(gauges),
        )
