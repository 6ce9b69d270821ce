"""The state behind the dashboard at one moment, gathered once for all viewers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tiercel.server.api.context import ServerContext
from tiercel.server.client.sequences import SequenceFacts
from tiercel.server.metrics.tenants import TenantMetricsSample
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.outcome import FairGauges, TenantGauges
from tiercel.values.tenant import TenantShare

OpenSequence = tuple[SeqId, SequenceFacts]


@dataclass(frozen=True, slots=True)
class TenantState:
    """One tenant: its share, its counts, and its state at the engine."""

    share: TenantShare
    sample: TenantMetricsSample
    gauges: TenantGauges
    waits_s: float  # how long its oldest waiting request has waited without service

    @property
    def open(self) -> int:
        """Number of sequences that run or wait."""
        return self.sample.running + self.sample.waiting

    @property
    def active_weight(self) -> float:
        """Its weight if it wants service now, else 0."""
        return self.share.weight if self.open else 0.0

    @property
    def busyness(self) -> tuple[int, int]:
        """The sort key: open sequences, then generated tokens."""
        return self.open, self.sample.generation_tokens


@dataclass(slots=True)
class BandTotals:
    """The totals of the tenants of one band."""

    active_weight: float = 0.0
    service_s: float = 0.0
    generation_tokens: int = 0


class Moment:
    """The state of the server at one moment, as far as the dashboard shows it."""

    def __init__(self, context: ServerContext, at_s: float) -> None:
        self.at_s = at_s
        self.gauges = context.client.gauges
        self.fair = self.gauges.fair or FairGauges()
        self.gauges_by_seq = {gauges.seq: gauges for gauges in self.gauges.sequences}
        self.tenant_by_name = {tenant.share.name: tenant for tenant in _tenants_seen(context, self.fair)}
        self.totals_by_band: dict[int, BandTotals] = {}
        for tenant in self.tenant_by_name.values():
            totals = self.totals_by_band.setdefault(tenant.share.band, BandTotals())
            totals.active_weight += tenant.active_weight
            totals.service_s += tenant.gauges.service_s
            totals.generation_tokens += tenant.sample.generation_tokens
        self._open = [
            (seq, facts) for seq, facts in context.client.sequences.facts_by_seq.items() if facts.mailbox is not None
        ]
        self._open_by_tenant: dict[TenantId, list[OpenSequence]] = {}
        for seq, facts in self._open:
            self._open_by_tenant.setdefault(facts.start.tenant, []).append((seq, facts))

    def tenants(self, own: TenantId | None) -> list[TenantState]:
        """Return the state of one tenant, or of all."""
        if own is None:
            return list(self.tenant_by_name.values())
        return [self.tenant_by_name[own]] if own in self.tenant_by_name else []

    def sample(self, own: TenantId) -> TenantMetricsSample:
        """Return the counts of one tenant; zeros if it has sent no request."""
        return self.tenant_by_name[own].sample if own in self.tenant_by_name else TenantMetricsSample()

    def open_sequences(self, own: TenantId | None) -> Sequence[OpenSequence]:
        """Return the sequences of one tenant, or of all, whose client has not left, in order of arrival."""
        return self._open if own is None else self._open_by_tenant.get(own, ())


def _tenants_seen(context: ServerContext, fair: FairGauges) -> Iterator[TenantState]:
    """Yield every configured tenant that has sent a request."""
    metrics, table = context.metrics.tenants, context.tenants.table
    gauges_by_tenant = {gauges.tenant: gauges for gauges in fair.tenants}
    waits_s = metrics.waits_s()
    for name in dict.fromkeys((*metrics.seen, *waits_s)):
        if name in table.by_name:
            gauges = gauges_by_tenant.get(name) or TenantGauges(tenant=name)
            yield TenantState(table.by_name[name].share, metrics.sample(name), gauges, waits_s.get(name, 0.0))
