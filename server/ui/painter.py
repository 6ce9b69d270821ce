"""Draws what the page is told from the books of the HTTP process. Nothing is kept between two looks."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice

import msgspec

from server.auth import Viewer
from server.client import EngineState, SequenceFacts
from server.metrics import ServerMetrics
from server.service import Service
from server.tenant_metrics import TenantFigures, TenantMetrics
from server.tenants import TenantTable
from server.ui import picture
from tiercel import __version__
from tiercel.ids import SeqId, TenantId
from tiercel.outcome import FairGauges, Gauges, SequenceGauges, SequenceState, TenantGauges, TierGauges
from tiercel.tenant import TenantShare

MOST_TENANTS = 24  # told by name
MOST_PARTS = 8  # tenants of one tier
MOST_REQUESTS = 48

_FRESH_S = 0.2  # several who look at once see the same picture
_FIRST_TOKEN, _GAP, _QUEUE = (
    f"vllm:{name}_seconds" for name in ("time_to_first_token", "inter_token_latency", "request_queue_time")
)
_PROMPT, _GENERATION, _CACHED, _ENDED = (
    f"vllm:{name}_total" for name in ("prompt_tokens", "generation_tokens", "prompt_tokens_cached", "request_success")
)
_NAMES = (_PROMPT, _GENERATION, _CACHED, _ENDED, *(f"{name}_bucket" for name in (_FIRST_TOKEN, _GAP, _QUEUE)))


class Painter:
    """Pictures of one service, as JSON."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._bodies: dict[tuple[TenantId | None, bool], bytes] = {}
        self._drawn_s = 0.0

    def paint(self, viewer: Viewer) -> bytes:
        """The picture of now, or of a moment ago. Cost: O(open sequences + tenants seen), no I/O."""
        now_s = self._service.clock.now_s()
        if now_s - self._drawn_s >= _FRESH_S:
            self._bodies.clear()
            self._drawn_s = now_s
        name = None if viewer.tenant is None else viewer.tenant.name
        body = self._bodies.get((name, viewer.is_operator))
        if body is None:
            body = msgspec.json.encode(self._picture(viewer, now_s))
            self._bodies[name, viewer.is_operator] = body
        return body

    def _picture(self, viewer: Viewer, now_s: float) -> picture.Picture:
        service = self._service
        gauges = service.client.gauges
        fair = gauges.fair or FairGauges()
        own = None if viewer.is_operator or viewer.tenant is None else viewer.tenant.name
        return picture.Picture(
            at_s=round(now_s, 4),
            version=__version__,
            engine=self._engine(),
            viewer=picture.Viewer(
                role="operator" if own is None else "tenant",
                tenant=None if viewer.tenant is None else viewer.tenant.name,
                has_chat=service.template is not None,
            ),
            queue=picture.Queue(running=gauges.num_running, waiting=gauges.num_waiting, preempted=gauges.num_preempted),
            work=_work(service.metrics, gauges) if own is None else _own_work(service.metrics.tenants.figures(own)),
            tiers=[_tier(tier, own) for tier in gauges.tiers],
            disk_state=gauges.disk_state.value,
            routes=_routes(gauges) if own is None else [],
            tenants=_tenants(_seats(service.metrics.tenants, service.tenants.table, fair), own, fair),
            requests=_requests(service.client.facts_by_seq.items(), own, gauges.sequences, now_s),
        )

    def _engine(self) -> picture.Engine:
        service = self._service
        client, ready = service.client, service.client.ready
        return picture.Engine(
            state=client.state.value,
            stage=client.stage,
            is_stalled=client.state is EngineState.READY and service.is_stalled,
            is_draining=service.admission.is_closed,
            model=service.settings.served_model_names[0],
            device=None if ready is None else ready.device,
            dtype=None if ready is None else ready.dtype,
            block_tokens=None if ready is None else ready.block_size,
            context_tokens=None if ready is None else ready.max_model_len,
        )


@dataclass(frozen=True, slots=True)
class _Seat:
    """One tenant: its due, what it was served, and what it has now."""

    share: TenantShare
    figures: TenantFigures
    standing: TenantGauges

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


def _seats(metrics: TenantMetrics, table: TenantTable, fair: FairGauges) -> list[_Seat]:
    """Every configured tenant that has asked for anything."""
    standing = {one.tenant: one for one in fair.tenants}
    names = dict.fromkeys((*metrics.seen, *standing))
    return [
        _Seat(table.by_name[name].share, metrics.figures(name), standing.get(name) or TenantGauges(tenant=name))
        for name in names
        if name in table.by_name
    ]


def _tenants(seats: Sequence[_Seat], own: TenantId | None, fair: FairGauges) -> picture.Tenants:
    weight_by_band: dict[int, float] = {}
    for seat in seats:
        band = seat.share.band
        weight_by_band[band] = weight_by_band.get(band, 0.0) + seat.active_weight
    shown = [seat for seat in seats if own is None or seat.share.name == own]
    busiest = nlargest(MOST_TENANTS, shown, key=lambda seat: seat.busyness)
    bands = sorted({seat.share.band for seat in shown})
    is_told = own is None
    return picture.Tenants(
        rows=[_tenant(seat, weight_by_band[seat.share.band]) for seat in busiest],
        seen=len(shown),
        bands=[_band(band, seats, shown) for band in bands],
        jain=round(fair.jain, 4) if is_told and fair.jain is not None else None,
        gap_s=round(fair.gap_s, 4) if is_told and fair.gap_s is not None else None,
    )


def _tenant(seat: _Seat, active_weight: float) -> picture.TenantPicture:
    share, figures, standing = seat.share, seat.figures, seat.standing
    return picture.TenantPicture(
        name=share.name,
        weight=share.weight,
        band=share.band,
        running=figures.running,
        waiting=figures.waiting,
        prompt_tokens=figures.prompt_tokens,
        generation_tokens=figures.generation_tokens,
        service_s=round(standing.service_s, 4),
        starving_s=round(standing.starving_s, 3),
        fair_share=round(seat.active_weight / active_weight, 5) if active_weight else 0.0,
    )


def _band(band: int, seats: Iterable[_Seat], shown: Iterable[_Seat]) -> picture.BandPicture:
    """Device time of everybody in it, tokens of those that are shown alone."""
    return picture.BandPicture(
        band=band,
        service_s=round(sum(seat.standing.service_s for seat in seats if seat.share.band == band), 4),
        generation_tokens=sum(seat.figures.generation_tokens for seat in shown if seat.share.band == band),
    )


def _work(metrics: ServerMetrics, gauges: Gauges) -> picture.Work:
    """From the samples that `/metrics` has."""
    sums: dict[str, float] = {}
    buckets: dict[str, list[tuple[float, float]]] = {}
    for sample in metrics.samples(_NAMES):
        bound = sample.labels.get("le")
        if bound is None:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        else:
            buckets.setdefault(sample.name.removesuffix("_bucket"), []).append((float(bound), sample.value))
    return picture.Work(
        prompt_tokens=sums.get(_PROMPT, 0.0),
        generation_tokens=sums.get(_GENERATION, 0.0),
        cached_tokens=sums.get(_CACHED, 0.0),
        finished=sums.get(_ENDED, 0.0),
        swaps=gauges.preemptions_swap,
        recomputes=gauges.preemptions_recompute,
        first_token=_histogram(buckets.get(_FIRST_TOKEN, ())),
        gap=_histogram(buckets.get(_GAP, ())),
        queue=_histogram(buckets.get(_QUEUE, ())),
    )


def _own_work(figures: TenantFigures) -> picture.Work:
    """What a tenant may know: its own."""
    return picture.Work(
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


def _histogram(buckets: Iterable[tuple[float, float]]) -> picture.Histogram:
    """The last bound is infinite, and goes without saying."""
    ordered = sorted(buckets)
    return picture.Histogram(tuple(bound for bound, _ in ordered[:-1]), tuple(count for _, count in ordered))


def _tier(tier: TierGauges, own: TenantId | None) -> picture.TierPicture:
    told = (part for part in tier.tenants if own is None or part.tenant == own)
    size = tier.block_bytes
    return picture.TierPicture(
        tier=tier.tier.value,
        capacity=tier.blocks_total * size,
        used=tier.blocks_used * size,
        cached=tier.blocks_cached * size,
        block=size,
        hit_tokens=tier.hit_tokens if own is None else None,
        missed_tokens=tier.missed_tokens if own is None else None,
        evictions=tier.evictions if own is None else None,
        tenants=[
            picture.TenantBytes(name=part.tenant, used=part.used * size, cached=part.cached * size)
            for part in islice(told, MOST_PARTS)
        ],
    )


def _routes(gauges: Gauges) -> list[picture.RoutePicture]:
    return [
        picture.RoutePicture(
            route=route.route.value,
            blocks=route.blocks,
            bytes=route.bytes,
            seconds=round(route.seconds, 4),
            failures=route.failures,
            late=route.late,
        )
        for route in gauges.routes
    ]


def _requests(
    facts_by_seq: Iterable[tuple[SeqId, SequenceFacts]],
    own: TenantId | None,
    sequences: Iterable[SequenceGauges],
    now_s: float,
) -> picture.Requests:
    running: list[tuple[SeqId, SequenceFacts]] = []
    waiting: list[tuple[SeqId, SequenceFacts]] = []
    for seq, facts in facts_by_seq:
        if facts.mailbox is not None and (own is None or facts.start.tenant == own):
            (waiting if facts.first_token_s is None else running).append((seq, facts))
    told = {one.seq: one for one in sequences}
    shown: Iterator[tuple[SeqId, SequenceFacts]] = islice((*running, *waiting), MOST_REQUESTS)
    rows = [_request(seq, facts, told.get(seq), now_s) for seq, facts in shown]
    return picture.Requests(rows=rows, running=len(running), waiting=len(waiting))


def _request(seq: SeqId, facts: SequenceFacts, told: SequenceGauges | None, now_s: float) -> picture.RequestPicture:
    start, first_s = facts.start, facts.first_token_s
    gaps = facts.num_outputs - 1
    return picture.RequestPicture(
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


def _state(facts: SequenceFacts, told: SequenceGauges | None) -> picture.RequestState:
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
