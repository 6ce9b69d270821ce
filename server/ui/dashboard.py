"""Draws what the page is told from the books of the HTTP process. Nothing is kept for longer than a moment."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice

import msgspec

from tiercel import __version__
from tiercel.ids import SeqId, TenantId
from tiercel.outcome import FairGauges, Gauges, SequenceGauges, SequenceState, TenantGauges, TierGauges
from tiercel.server.api.context import ServerContext
from tiercel.server.engine.sequences import SequenceFacts
from tiercel.server.engine.status import EngineState
from tiercel.server.metrics.registry import ServerMetrics
from tiercel.server.metrics.tenants import TenantMetricsSample
from tiercel.server.tenancy.auth import Viewer
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
from tiercel.tenant import TenantShare

MOST_TENANTS = 24  # told by name
MOST_PARTS = 8  # tenants of one tier
MOST_REQUESTS = 48

_FRESH_S = 0.2  # several who look at once see the same picture

_Book = tuple[SeqId, SequenceFacts]


class Dashboard:
    """Pictures of one server, as JSON."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._bodies: dict[tuple[TenantId | None, bool], bytes] = {}
        self._moment: _Moment | None = None

    def snapshot(self, viewer: Viewer) -> bytes:
        """The picture of now, or of a moment ago, without I/O.

        Cost: O(open sequences + tenants seen) once in 0.2 s; beside that a tenant's picture costs what it holds itself.
        """
        now_s, moment = self._context.clock.now_s(), self._moment
        if moment is None or now_s - moment.at_s >= _FRESH_S:
            self._bodies.clear()
            moment = self._moment = _Moment(self._context, now_s)
        name = None if viewer.tenant is None else viewer.tenant.name
        body = self._bodies.get((name, viewer.is_operator))
        if body is None:
            body = msgspec.json.encode(self._build(viewer, moment))
            self._bodies[name, viewer.is_operator] = body
        return body

    def _build(self, viewer: Viewer, moment: "_Moment") -> DashboardSnapshot:
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
            work=_work(context.metrics, gauges) if own is None else _own_work(moment.figures(own)),
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
            is_stalled=client.status.state is EngineState.READY and context.is_stalled,
            is_draining=context.admission.is_closed,
            model=context.settings.served_model_names[0],
            device=None if ready is None else ready.device,
            dtype=None if ready is None else ready.dtype,
            block_tokens=None if ready is None else ready.block_size,
            context_tokens=None if ready is None else ready.max_model_len,
        )


@dataclass(frozen=True, slots=True)
class _Seat:
    """One tenant: its due, what it was served, and what it has now."""

    share: TenantShare
    figures: TenantMetricsSample
    standing: TenantGauges
    waits_s: float

    @property
    def open(self) -> int:
        """Sequences that run and that wait."""
        return self.figures.running + self.figures.waiting

    @property
    def active_weight(self) -> float:
        """Its weight while it wants service."""
        return self.share.weight if self.open else 0.0

    @property
    def busyness(self) -> tuple[int, int]:
        """Who has more is named first."""
        return self.open, self.figures.generation_tokens


@dataclass(slots=True)
class _BandSums:
    """What the seats of one band have together."""

    active_weight: float = 0.0
    service_s: float = 0.0
    generation_tokens: int = 0


class _Moment:
    """What all pictures of one moment are drawn from, gathered once, however many look."""

    def __init__(self, context: ServerContext, at_s: float) -> None:
        self.at_s = at_s
        self.gauges = context.client.gauges
        self.fair = self.gauges.fair or FairGauges()
        self.told_by_seq = {one.seq: one for one in self.gauges.sequences}
        self.seat_by_name = {seat.share.name: seat for seat in _seats(context, self.fair)}
        self.sums_by_band: dict[int, _BandSums] = {}
        for seat in self.seat_by_name.values():
            sums = self.sums_by_band.setdefault(seat.share.band, _BandSums())
            sums.active_weight += seat.active_weight
            sums.service_s += seat.standing.service_s
            sums.generation_tokens += seat.figures.generation_tokens
        self._books = [
            (seq, facts) for seq, facts in context.client.sequences.facts_by_seq.items() if facts.mailbox is not None
        ]
        self._books_by_name: dict[TenantId, list[_Book]] = {}
        for seq, facts in self._books:
            self._books_by_name.setdefault(facts.start.tenant, []).append((seq, facts))

    def seats(self, own: TenantId | None) -> list[_Seat]:
        """Of one tenant, or of all."""
        if own is None:
            return list(self.seat_by_name.values())
        return [self.seat_by_name[own]] if own in self.seat_by_name else []

    def figures(self, own: TenantId) -> TenantMetricsSample:
        """Of one tenant, which may not have asked for anything."""
        return self.seat_by_name[own].figures if own in self.seat_by_name else TenantMetricsSample()

    def books(self, own: TenantId | None) -> Sequence[_Book]:
        """Open requests of one tenant, or of all, in order of arrival."""
        return self._books if own is None else self._books_by_name.get(own, ())


def _seats(context: ServerContext, fair: FairGauges) -> Iterator[_Seat]:
    """Every configured tenant that has asked for anything."""
    metrics, table = context.metrics.tenants, context.tenants.table
    standing = {one.tenant: one for one in fair.tenants}
    waits_s = metrics.waits_s()
    for name in dict.fromkeys((*metrics.seen, *waits_s)):
        if name in table.by_name:
            one = standing.get(name) or TenantGauges(tenant=name)
            yield _Seat(table.by_name[name].share, metrics.sample(name), one, waits_s.get(name, 0.0))


def _tenants(moment: _Moment, own: TenantId | None) -> TenantsSnapshot:
    seats, fair = moment.seats(own), moment.fair
    busiest = nlargest(MOST_TENANTS, seats, key=lambda seat: seat.busyness)
    bands = sorted({seat.share.band for seat in seats})
    is_told = own is None
    return TenantsSnapshot(
        rows=[_tenant(seat, moment.sums_by_band[seat.share.band].active_weight) for seat in busiest],
        seen=len(seats),
        bands=[_band(band, moment.sums_by_band[band], own, moment) for band in bands],
        jain=round(fair.jain, 4) if is_told and fair.jain is not None else None,
        gap_s=round(fair.gap_s, 4) if is_told and fair.gap_s is not None else None,
    )


def _tenant(seat: _Seat, active_weight: float) -> TenantSnapshot:
    share, figures, standing = seat.share, seat.figures, seat.standing
    return TenantSnapshot(
        name=share.name,
        weight=share.weight,
        band=share.band,
        running=figures.running,
        waiting=figures.waiting,
        prompt_tokens=figures.prompt_tokens,
        generation_tokens=figures.generation_tokens,
        service_s=round(standing.service_s, 4),
        starving_s=round(seat.waits_s, 3),
        fair_share=round(seat.active_weight / active_weight, 5) if active_weight else 0.0,
    )


def _band(band: int, sums: _BandSums, own: TenantId | None, moment: _Moment) -> BandSnapshot:
    """Device time of everybody in it, tokens of those that are shown alone."""
    tokens = sums.generation_tokens if own is None else moment.figures(own).generation_tokens
    return BandSnapshot(band=band, service_s=round(sums.service_s, 4), generation_tokens=tokens)


def _work(metrics: ServerMetrics, gauges: Gauges) -> WorkSnapshot:
    """From the numbers that `/metrics` has."""
    figures = metrics.sample()
    return WorkSnapshot(
        prompt_tokens=figures.prompt_tokens,
        generation_tokens=figures.generation_tokens,
        cached_tokens=figures.cached_tokens,
        finished=figures.finished,
        swaps=gauges.preemptions_swap,
        recomputes=gauges.preemptions_recompute,
        first_token=_histogram(figures.first_token),
        gap=_histogram(figures.gap),
        queue=_histogram(figures.queue),
    )


def _own_work(figures: TenantMetricsSample) -> WorkSnapshot:
    """What a tenant may know: its own."""
    return WorkSnapshot(
        prompt_tokens=figures.prompt_tokens,
        generation_tokens=figures.generation_tokens,
        cached_tokens=None,
        finished=None,
        swaps=None,
        recomputes=None,
        first_token=_histogram(figures.first_tokens),
        gap=None,
        queue=None,
    )


def _histogram(below: Sequence[tuple[float, int]]) -> HistogramSnapshot:
    """The last bound is infinite, and goes without saying."""
    return HistogramSnapshot(tuple(bound for bound, _ in below[:-1]), tuple(count for _, count in below))


def _tier(tier: TierGauges, own: TenantId | None) -> TierSnapshot:
    told = (part for part in tier.tenants if own is None or part.tenant == own)
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
            for part in islice(told, MOST_PARTS)
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


def _requests(moment: _Moment, own: TenantId | None) -> RequestsSnapshot:
    running: list[_Book] = []
    waiting: list[_Book] = []
    for seq, facts in moment.books(own):
        (waiting if facts.first_token_s is None else running).append((seq, facts))
    shown = islice((*running, *waiting), MOST_REQUESTS)
    rows = [_request(seq, facts, moment.told_by_seq.get(seq), moment.at_s) for seq, facts in shown]
    return RequestsSnapshot(rows=rows, running=len(running), waiting=len(waiting))


def _request(seq: SeqId, facts: SequenceFacts, told: SequenceGauges | None, now_s: float) -> RequestSnapshot:
    start, first_s = facts.start, facts.first_token_s
    gaps = facts.num_outputs - 1
    return RequestSnapshot(
        seq=seq,
        tenant=start.tenant,
        band=start.band,
        state=_state(facts, told),
        prompt_tokens=start.num_prompt,
        computed_tokens=None if told is None else told.computed,
        output_tokens=facts.num_outputs,
        most_outputs=start.params.max_tokens,
        age_s=round(now_s - facts.arrival_s, 3),
        ttft_s=None if first_s is None else round(first_s - facts.arrival_s, 4),
        gap_s=None if first_s is None or gaps < 1 else round((facts.last_token_s - first_s) / gaps, 4),
        preemptions=0 if told is None else told.preemptions,
    )


def _state(facts: SequenceFacts, told: SequenceGauges | None) -> RequestState:
    """What the engine told last; of a sequence that it did not tell of, what can be seen from here."""
    match told.state if told is not None else None:
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
