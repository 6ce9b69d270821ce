"""Dashboard snapshots: what /ui/data answers, from the state of the HTTP process, without I/O."""

from collections.abc import Sequence
from heapq import nlargest
from itertools import islice

import msgspec

from tiercel import __version__
from tiercel.server.api.context import ServerContext
from tiercel.server.client.sequences import SequenceFacts
from tiercel.server.metrics.registry import ServerMetrics
from tiercel.server.metrics.tenants import TenantMetricsSample
from tiercel.server.tenancy.auth import Viewer
from tiercel.server.ui.moment import BandTotals, Moment, OpenSequence, TenantState
from tiercel.server.ui.snapshot import (
    BandSnapshot,
    DashboardSnapshot,
    EngineSnapshot,
    HistogramSnapshot,
    QueueSnapshot,
    RequestSnapshot,
    RequestsSnapshot,
    RequestState,
    RouteSnapshot,
    TenantBytes,
    TenantSnapshot,
    TenantsSnapshot,
    TierSnapshot,
    ViewerSnapshot,
    WorkSnapshot,
)
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.outcome import Gauges, SequenceGauges, SequenceState, TierGauges

MAX_TENANTS = 24  # listed by name
MAX_TIER_TENANTS = 8  # listed for one tier
MAX_REQUESTS = 48

_MAX_AGE_S = 0.2  # of a moment that several viewers share


class Dashboard:
    """The source of dashboard snapshots of one server."""

    def __init__(self, context: ServerContext, *, max_age_s: float = _MAX_AGE_S) -> None:
        self._context = context
        self._max_age_s = max_age_s
        self._bodies: dict[tuple[TenantId | None, bool], bytes] = {}
        self._moment: Moment | None = None

    def snapshot(self, viewer: Viewer) -> bytes:
        """Return the snapshot for a viewer as JSON, at most `max_age_s` old.

        Cost: O(open sequences + tenants seen) once per `max_age_s`; in addition, O(its own sequences) for a tenant.
        """
        now_s, moment = self._context.clock.now_s(), self._moment
        if moment is None or now_s - moment.at_s >= self._max_age_s:
            self._bodies.clear()
            moment = self._moment = Moment(self._context, now_s)
        name = None if viewer.tenant is None else viewer.tenant.name
        body = self._bodies.get((name, viewer.is_operator))
        if body is None:
            body = msgspec.json.encode(self._build(viewer, moment))
            self._bodies[name, viewer.is_operator] = body
        return body

    def _build(self, viewer: Viewer, moment: Moment) -> DashboardSnapshot:
        context, gauges = self._context, moment.gauges
        own = None if viewer.is_operator or viewer.tenant is None else viewer.tenant.name
        return DashboardSnapshot(
            at_s=round(moment.at_s, 4),
            version=__version__,
            engine=self._engine(),
            viewer=ViewerSnapshot(
                role="operator" if own is None else "tenant",
                tenant=None if viewer.tenant is None else viewer.tenant.name,
                has_chat=context.template is not None,
            ),
            queue=QueueSnapshot(running=gauges.num_running, waiting=gauges.num_waiting, preempted=gauges.num_preempted),
            work=_work(context.metrics, gauges) if own is None else _own_work(moment.sample(own)),
            tiers=[_tier(tier, own) for tier in gauges.tiers],
            disk_state=gauges.disk_state.value,
            routes=_routes(gauges) if own is None else [],
            tenants=_tenants(moment, own),
            requests=_requests(moment, own),
        )

    def _engine(self) -> EngineSnapshot:
        context = self._context
        client, ready = context.client, context.client.status.ready
        return EngineSnapshot(
            state=client.status.state.value,
            stage=client.status.stage,
            is_stalled=client.status.is_stalled,
            is_draining=context.admission.is_closed,
            model=context.settings.served_model_names[0],
            device=None if ready is None else ready.device,
            dtype=None if ready is None else ready.dtype,
            block_tokens=None if ready is None else ready.block_size,
            context_tokens=None if ready is None else ready.max_model_len,
        )


def _tenants(moment: Moment, own: TenantId | None) -> TenantsSnapshot:
    tenants, fair = moment.tenants(own), moment.fair
    busiest = nlargest(MAX_TENANTS, tenants, key=lambda tenant: tenant.busyness)
    bands = sorted({tenant.share.band for tenant in tenants})
    is_operator = own is None
    return TenantsSnapshot(
        rows=[_tenant(tenant, moment.totals_by_band[tenant.share.band].active_weight) for tenant in busiest],
        seen=len(tenants),
        bands=[_band(band, moment.totals_by_band[band], own, moment) for band in bands],
        jain=round(fair.jain, 4) if is_operator and fair.jain is not None else None,
        gap_s=round(fair.gap_s, 4) if is_operator and fair.gap_s is not None else None,
    )


def _tenant(tenant: TenantState, active_weight: float) -> TenantSnapshot:
    share, sample = tenant.share, tenant.sample
    return TenantSnapshot(
        name=share.name,
        weight=share.weight,
        band=share.band,
        running=sample.running,
        waiting=sample.waiting,
        prompt_tokens=sample.prompt_tokens,
        generation_tokens=sample.generation_tokens,
        service_s=round(tenant.gauges.service_s, 4),
        starving_s=round(tenant.waits_s, 3),
        fair_share=round(tenant.active_weight / active_weight, 5) if active_weight else 0.0,
    )


def _band(band: int, totals: BandTotals, own: TenantId | None, moment: Moment) -> BandSnapshot:
    """Return a band: the device time of all its tenants, and the tokens of those that the viewer may see."""
    tokens = totals.generation_tokens if own is None else moment.sample(own).generation_tokens
    return BandSnapshot(band=band, service_s=round(totals.service_s, 4), generation_tokens=tokens)


def _work(metrics: ServerMetrics, gauges: Gauges) -> WorkSnapshot:
    """Return the work for all tenants, from the numbers of `/metrics`."""
    sample = metrics.sample()
    return WorkSnapshot(
        prompt_tokens=sample.prompt_tokens,
        generation_tokens=sample.generation_tokens,
        cached_tokens=sample.cached_tokens,
        finished=sample.finished,
        swaps=gauges.preemptions_swap,
        recomputes=gauges.preemptions_recompute,
        first_token=_histogram(sample.first_token),
        gap=_histogram(sample.gap),
        queue=_histogram(sample.queue),
    )


def _own_work(sample: TenantMetricsSample) -> WorkSnapshot:
    """Return the work for one tenant; what it may not know is None."""
    return WorkSnapshot(
        prompt_tokens=sample.prompt_tokens,
        generation_tokens=sample.generation_tokens,
        cached_tokens=None,
        finished=None,
        swaps=None,
        recomputes=None,
        first_token=_histogram(sample.first_tokens),
        gap=None,
        queue=None,
    )


def _histogram(below: Sequence[tuple[float, int]]) -> HistogramSnapshot:
    """Return a histogram without its last bound, which is infinite."""
    return HistogramSnapshot(tuple(bound for bound, _ in below[:-1]), tuple(count for _, count in below))


def _tier(tier: TierGauges, own: TenantId | None) -> TierSnapshot:
    parts = (part for part in tier.tenants if own is None or part.tenant == own)
    size = tier.block_bytes
    return TierSnapshot(
        tier=tier.tier.value,
        capacity=tier.blocks_total * size,
        used=tier.blocks_used * size,
        cached=tier.blocks_cached * size,
        block=size,
        hit_tokens=tier.hit_tokens if own is None else None,
        missed_tokens=tier.missed_tokens if own is None else None,
        evictions=tier.evictions if own is None else None,
        tenants=[
            TenantBytes(name=part.tenant, used=part.used * size, cached=part.cached * size)
            for part in islice(parts, MAX_TIER_TENANTS)
        ],
    )


def _routes(gauges: Gauges) -> list[RouteSnapshot]:
    return [
        RouteSnapshot(
            route=route.route.value,
            blocks=route.blocks,
            bytes=route.bytes,
            seconds=round(route.seconds, 4),
            failures=route.failures,
            late=route.late,
        )
        for route in gauges.routes
    ]


def _requests(moment: Moment, own: TenantId | None) -> RequestsSnapshot:
    running: list[OpenSequence] = []
    waiting: list[OpenSequence] = []
    for seq, facts in moment.open_sequences(own):
        (waiting if facts.first_token_s is None else running).append((seq, facts))
    shown = islice((*running, *waiting), MAX_REQUESTS)
    rows = [_request(seq, facts, moment.gauges_by_seq.get(seq), moment.at_s) for seq, facts in shown]
    return RequestsSnapshot(rows=rows, running=len(running), waiting=len(waiting))


def _request(seq: SeqId, facts: SequenceFacts, gauges: SequenceGauges | None, now_s: float) -> RequestSnapshot:
    start, first_s = facts.start, facts.first_token_s
    gaps = facts.num_outputs - 1
    return RequestSnapshot(
        seq=seq,
        tenant=start.tenant,
        band=start.band,
        state=_state(facts, gauges),
        prompt_tokens=start.num_prompt,
        computed_tokens=None if gauges is None else gauges.computed,
        output_tokens=facts.num_outputs,
        most_outputs=start.params.max_tokens,
        age_s=round(now_s - facts.arrival_s, 3),
        ttft_s=None if first_s is None else round(first_s - facts.arrival_s, 4),
        gap_s=None if first_s is None or gaps < 1 else round((facts.last_token_s - first_s) / gaps, 4),
        preemptions=0 if gauges is None else gauges.preemptions,
    )


def _state(facts: SequenceFacts, gauges: SequenceGauges | None) -> RequestState:
    """Return the state as the engine reported it last; without a report, as it is known in this process."""
    match gauges.state if gauges is not None else None:
        case SequenceState.RESTORING:
            return "restoring"
        case SequenceState.DRAINING:
            return "draining"
        case SequenceState.PREEMPTED:
            return "preempted"
        case SequenceState.RUNNING if facts.first_token_s is None:
            return "prefill"
        case _:
            return "waiting" if facts.first_token_s is None else "decode"
