"""Metrics per tenant, for the configured tenants that have sent a request.

The text is written without prometheus_client, because a thousand tenants have ten thousand lines. A tenant has ten
lines, and more with detail.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from tiercel.server.client.sequences import SequenceFacts
from tiercel.server.metrics.exposition import Kind, family, histogram, joined, labels, single, summary
from tiercel.server.metrics.histogram import HistogramCounter
from tiercel.server.tenancy.tenants import TenantTable
from tiercel.values.ids import TenantId
from tiercel.values.outcome import FairGauges, Finished, Gauges, TenantGauges
from tiercel.values.tenant import Slo

_FIRST_TOKEN_S = (0.1, 0.5, 2.0, 10.0)

Counts = Callable[[TenantId], tuple[int, int]]
"""Returns the numbers of running and waiting sequences of a tenant."""

Waits = Callable[[], Mapping[TenantId, float]]
"""Returns, per waiting tenant, the age of its oldest sequence without a first token."""


def oldest_waits(books: Iterable[SequenceFacts], now_s: float) -> dict[TenantId, float]:
    """Return the wait of each tenant's oldest sequence without a first token. Cost: O(open sequences).

    `books` are the open sequences of the HTTP process, in order of arrival.
    """
    waits: dict[TenantId, float] = {}
    for facts in books:
        if facts.first_token_s is None and facts.mailbox is not None:
            waits.setdefault(facts.start.tenant, now_s - facts.arrival_s)
    return waits


@dataclass(frozen=True, slots=True)
class TenantMetricsSample:
    """The counters of one tenant at one moment."""

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    first_tokens: tuple[
        tuple[float, int], ...
    ] = ()  # by bound in seconds, the last one infinite: first tokens up to it


class _Row:
    """The counters of one tenant."""

    __slots__ = (
        *("first_tokens", "label", "outputs", "prompts", "queue_s", "recomputed", "slo", "swapped", "throttled"),
    )

    def __init__(self, name: TenantId, slo: Slo) -> None:
        self.label = labels(tenant=name)
        self.slo = slo
        self.prompts = 0  # tokens
        self.outputs = 0  # tokens
        self.queue_s = 0.0
        self.first_tokens = HistogramCounter(_FIRST_TOKEN_S)
        self.throttled: dict[str, int] = {}
        self.swapped = 0  # tokens of sequences that ended
        self.recomputed = 0  # tokens of sequences that ended


class _Goal:
    """The number of times that a latency goal applied, and was missed."""

    __slots__ = ("missed", "seen")

    def __init__(self) -> None:
        self.seen = 0
        self.missed = 0

    def note(self, seconds: float, goal_s: float, count: int = 1) -> None:
        """Count a latency, `count` times, and whether it missed the goal."""
        self.seen += count
        if seconds > goal_s:
            self.missed += count


class TenantMetrics:
    """The metrics by tenant. The metrics of a removed tenant are dropped.

    A page has at most ten lines per tenant. With detail it also has the distribution of first tokens, refusals by
    limit, and preemptions by reason and mode.
    """

    def __init__(self) -> None:
        self._table: TenantTable | None = None
        self._row_by_name: dict[TenantId, _Row] = {}
        self._goals = {"ttft": _Goal(), "tbt": _Goal()}
        self._refused = 0
        self._counts: Counts = _no_counts
        self._waits: Waits = dict
        self._fair = FairGauges()

    def open(self, counts: Counts, waits: Waits) -> None:
        """Set the sources of running and waiting sequences and of waits."""
        self._counts = counts
        self._waits = waits

    def set_table(self, table: TenantTable) -> None:
        """Replace the tenants."""
        self._table = table
        self._row_by_name = {name: row for name, row in self._row_by_name.items() if name in table.by_name}
        for name, row in self._row_by_name.items():
            row.slo = table.by_name[name].share.slo

    def on_step(self, gauges: Gauges) -> None:
        """Store the newest gauges of the engine."""
        if gauges.fair is not None:
            self._fair = gauges.fair

    def on_refused_table(self) -> None:
        """Count a refused tenants document."""
        self._refused += 1

    def on_throttled(self, tenant: TenantId, reason: str) -> None:
        """Count a request refused because of its tenant's limit or goal."""
        row = self._row(tenant)
        if row is not None:
            row.throttled[reason] = row.throttled.get(reason, 0) + 1

    def on_first_token(self, facts: SequenceFacts, now_s: float) -> None:
        """Record the first token of a sequence."""
        row = self._row(facts.start.tenant)
        if row is None:
            return
        seconds = now_s - facts.arrival_s
        row.outputs += 1
        row.prompts += facts.start.num_prompt
        row.first_tokens.add(seconds)
        if row.slo.ttft_s is not None:
            self._goals["ttft"].note(seconds, row.slo.ttft_s)

    def on_tokens(self, name: TenantId, count: int, gap_s: float) -> None:
        """Record later tokens of as many sequences of a tenant, each `gap_s` after the token before."""
        row = self._row(name)
        if row is None:
            return
        row.outputs += count
        if row.slo.tbt_s is not None:
            self._goals["tbt"].note(gap_s, row.slo.tbt_s, count)

    def on_finished(self, facts: SequenceFacts, finished: Finished) -> None:
        """Record the end of a sequence."""
        row = self._row(facts.start.tenant)
        if row is not None:
            row.queue_s += finished.queued_s
            row.swapped += finished.swapped_tokens
            row.recomputed += finished.recomputed_tokens

    @property
    def seen(self) -> tuple[TenantId, ...]:
        """The tenants that have been counted."""
        return tuple(self._row_by_name)

    def waits_s(self) -> dict[TenantId, float]:
        """Return the time that each tenant's oldest waiting sequence has waited, also of tenants never served.

        The policy `fair` reports the time exactly: preempted sequences wait, prompts that are being computed do not.
        With other policies it is the age of the oldest sequence without a first token.
        """
        return {**self._waits(), **{one.tenant: one.starving_s for one in self._fair.tenants}}

    def sample(self, name: TenantId) -> TenantMetricsSample:
        """Return the counters of one tenant."""
        running, waiting = self._counts(name)
        row = self._row_by_name.get(name)
        if row is None:
            return TenantMetricsSample(running, waiting)
        return TenantMetricsSample(running, waiting, row.prompts, row.outputs, row.first_tokens.below())

    def exposition(self, *, has_detail: bool = False) -> str:
        """Return Prometheus text. May run in another thread than the updates."""
        return joined(self._pieces(has_detail=has_detail))

    def _row(self, name: TenantId) -> _Row | None:
        row = self._row_by_name.get(name)
        if row is None and self._table is not None and (tenant := self._table.by_name.get(name)) is not None:
            row = self._row_by_name[name] = _Row(name, tenant.share.slo)
        return row

    def _rows(self, table: TenantTable, waits: Iterable[TenantId]) -> Iterator[tuple[TenantId, _Row]]:
        """Yield the rows of all counted tenants, and an empty row for a tenant whose first request waits."""
        found = dict(self._row_by_name)
        for name in (*found, *(name for name in waits if name not in found)):
            tenant = table.by_name.get(name)
            if tenant is not None:
                yield name, found.get(name) or _Row(name, tenant.share.slo)

    def _pieces(self, *, has_detail: bool) -> Iterator[str]:
        table = self._table
        yield from self._whole(0 if table is None else table.version)
        if table is None:
            return
        waits = self.waits_s()
        rows = list(self._rows(table, waits))
        gauges_by_tenant = {one.tenant: one for one in self._fair.tenants}
        engine = [(row, gauges_by_tenant.get(name)) for name, row in rows]
        yield _family("weight", "gauge", "Weight of the tenant's share.", _each(
            (row, table.by_name[name].share.weight) for name, row in rows))  # fmt: skip
        yield _family("prompt_tokens_total", "counter", "Prompt tokens of sequences that got a first token.", _each(
            (row, row.prompts) for _, row in rows))  # fmt: skip
        yield _family("generation_tokens_total", "counter", "Tokens generated.", _each(
            (row, row.outputs) for _, row in rows))  # fmt: skip
        yield _family("queue_seconds_total", "counter", "Time that ended sequences had waited for their first slice.",
            _each((row, row.queue_s) for _, row in rows))  # fmt: skip
        yield _family("service_seconds_total", "counter", "Device time charged to the tenant by the policy `fair`.",
            _each((row, one.service_s) for row, one in engine if one is not None))  # fmt: skip
        yield _family("starvation_age_seconds", "gauge", "Time that the tenant's oldest waiting sequence has waited.",
            _each((row, waits.get(name, 0.0)) for name, row in rows))  # fmt: skip
        yield _family("throttled_total", "counter", "Requests refused because of a limit or goal of the tenant.", _each(
            (row, sum(list(row.throttled.values()))) for _, row in rows))  # fmt: skip
        yield _family("preemptions_total", "counter", "Preemptions of the tenant's sequences.", _each(
            (row, _preemptions(one)) for row, one in engine))  # fmt: skip
        yield _first_tokens([row for _, row in rows], has_buckets=has_detail)
        if has_detail:
            yield from self._detail(rows, engine)

    def _whole(self, version: int) -> Iterator[str]:
        """Yield the families that are not per tenant."""
        yield single("tiercel_tenants_config_version", "gauge", "Version of the tenants in force.", version)
        yield single("tiercel_tenants_config_errors_total", "counter", "Refused changes of the tenants.", self._refused)
        fair = self._fair
        yield single(
            "tiercel_fairness_tenants", "gauge",
            "Tenants of one band that have all had waiting work, for at most the last minute.",
            fair.competing,
        )  # fmt: skip
        if fair.jain is not None:
            yield single(
                "tiercel_fairness_jain", "gauge",
                "Jain's index of service by weight among competing tenants, in the worst band; absent if none compete.",
                fair.jain,
            )  # fmt: skip
        if fair.gap_s is not None:
            yield single(
                "tiercel_service_gap_seconds", "gauge",
                "Largest gap of service by weight between competing tenants of a band; absent if none compete.",
                fair.gap_s,
            )  # fmt: skip
        goals = [(name, goal) for name, goal in self._goals.items() if goal.seen]
        if goals:
            yield family(
                "tiercel_slo_total", "counter",
                "First tokens (ttft) and gaps between tokens (tbt) of tenants with that goal.",
                ((labels(goal=name), goal.seen) for name, goal in goals),
            )  # fmt: skip
            yield family(
                "tiercel_slo_missed_total", "counter", "The part of tiercel_slo_total that missed the goal.",
                ((labels(goal=name), goal.missed) for name, goal in goals),
            )  # fmt: skip

    def _detail(
        self, rows: list[tuple[TenantId, _Row]], engine: list[tuple[_Row, TenantGauges | None]]
    ) -> Iterator[str]:
        counts = [(row, *self._counts(name)) for name, row in rows]
        yield _family("running", "gauge", "Sequences with a first token.", _each(
            (row, running) for row, running, _ in counts))  # fmt: skip
        yield _family("waiting", "gauge", "Sequences without a first token.", _each(
            (row, waiting) for row, _, waiting in counts))  # fmt: skip
        yield _family("swapped_tokens_total", "counter",
            "Tokens of ended sequences that were restored from a lower tier after a preemption.",
            _each((row, row.swapped) for _, row in rows))  # fmt: skip
        yield _family("recomputed_tokens_total", "counter",
            "Tokens of ended sequences that were recomputed after a preemption.",
            _each((row, row.recomputed) for _, row in rows))  # fmt: skip
        yield _family("throttled_by_reason_total", "counter", "Refused requests by limit or goal.", (
            (f'reason="{reason}",{row.label}', count)
            for _, row in rows for reason, count in sorted(list(row.throttled.items()))
        ))  # fmt: skip
        yield _family("preemptions_by_reason_total", "counter", "Preemptions by reason and mode.",
            ((f'mode="{of.mode}",reason="{of.reason}",{row.label}', of.count)
             for row, one in engine if one is not None for of in one.preemptions))  # fmt: skip


def _first_tokens(rows: list[_Row], *, has_buckets: bool) -> str:
    write = histogram if has_buckets else summary
    counters = ((row.label, row.first_tokens) for row in rows)
    return write("tiercel_tenant_ttft_seconds", "Time from arrival to the first token.", counters)


def _preemptions(gauges: TenantGauges | None) -> int:
    return 0 if gauges is None else sum(one.count for one in gauges.preemptions)


def _each(values: Iterable[tuple[_Row, float]]) -> Iterator[tuple[str, float]]:
    return ((row.label, value) for row, value in values)


def _family(name: str, kind: Kind, text: str, samples: Iterable[tuple[str, float]]) -> str:
    return family(f"tiercel_tenant_{name}", kind, text, samples)


def _no_counts(_name: TenantId) -> tuple[int, int]:
    return 0, 0
