"""Numbers per tenant for Prometheus: of the configured tenants, and of those only that have been seen.

Written as text by hand: a thousand tenants are fifteen thousand lines.
"""

from collections.abc import Callable, Iterator

from server.client import SequenceFacts
from server.tenants import TenantTable
from tiercel.ids import TenantId
from tiercel.outcome import FairGauges, Finished, Gauges

_FIRST_TOKEN_S = (0.1, 0.5, 2.0, 10.0)

Counts = Callable[[TenantId], tuple[int, int]]
"""Sequences of a tenant that run and that wait."""


class _Row:
    """The counters of one tenant."""

    __slots__ = ("below", "first_tokens", "first_tokens_s", "outputs", "prompts", "queue_s", "throttled")

    def __init__(self) -> None:
        self.prompts = 0  # tokens
        self.outputs = 0  # tokens
        self.queue_s = 0.0
        self.below = [0] * len(_FIRST_TOKEN_S)
        self.first_tokens = 0
        self.first_tokens_s = 0.0
        self.throttled: dict[str, int] = {}


class TenantMetrics:
    """Counts by tenant. A tenant that leaves the table takes its numbers along."""

    def __init__(self) -> None:
        self._table: TenantTable | None = None
        self._row_by_name: dict[TenantId, _Row] = {}
        self._refused = 0
        self._counts: Counts = _no_counts
        self._fair = FairGauges()

    def open(self, counts: Counts) -> None:
        """Where to read what runs and waits."""
        self._counts = counts

    def set_table(self, table: TenantTable) -> None:
        """Other tenants from now on."""
        self._table = table
        self._row_by_name = {name: row for name, row in self._row_by_name.items() if name in table.by_name}

    def on_step(self, gauges: Gauges) -> None:
        """The engine's books, as of now."""
        if gauges.fair is not None:
            self._fair = gauges.fair

    def on_refused_table(self) -> None:
        """A tenants file or request was wrong."""
        self._refused += 1

    def on_throttled(self, tenant: TenantId, reason: str) -> None:
        """A request of this tenant was refused for a limit or a goal of its own."""
        row = self._row(tenant)
        if row is not None:
            row.throttled[reason] = row.throttled.get(reason, 0) + 1

    def on_token(self, facts: SequenceFacts, now_s: float, gap_s: float | None) -> None:
        """A sequence got a token."""
        row = self._row(facts.start.tenant)
        if row is None:
            return
        row.outputs += 1
        if gap_s is None:
            seconds = now_s - facts.arrival_s
            row.prompts += facts.start.num_prompt
            row.first_tokens += 1
            row.first_tokens_s += seconds
            for index, limit_s in enumerate(_FIRST_TOKEN_S):
                row.below[index] += seconds <= limit_s

    def on_finished(self, facts: SequenceFacts, finished: Finished) -> None:
        """A sequence ended."""
        row = self._row(facts.start.tenant)
        if row is not None:
            row.queue_s += finished.queued_s

    def exposition(self) -> bytes:
        """Prometheus text. Safe in another thread than the one that counts."""
        return "".join(f"{line}\n" for line in self._lines()).encode()

    def _row(self, name: TenantId) -> _Row | None:
        row = self._row_by_name.get(name)
        if row is None and self._table is not None and name in self._table.by_name:
            row = self._row_by_name[name] = _Row()
        return row

    def _lines(self) -> Iterator[str]:
        table = self._table
        yield from _head("tiercel_tenants_config_version", "gauge", "Version of the tenants in force.")
        yield f"tiercel_tenants_config_version {0 if table is None else table.version}"
        fair = self._fair
        yield from _head("tiercel_fairness_jain", "gauge", "Jain's index of service by weight in the last minute.")
        yield f"tiercel_fairness_jain {fair.jain}"
        yield from _head("tiercel_service_gap_seconds", "gauge", "Largest gap of service by weight in the last minute.")
        yield f"tiercel_service_gap_seconds {fair.gap_s}"
        yield from _head("tiercel_tenants_config_errors_total", "counter", "Tenants that were refused as wrong.")
        yield f"tiercel_tenants_config_errors_total {self._refused}"
        if table is None:
            return
        rows = [(name, row) for name, row in list(self._row_by_name.items()) if name in table.by_name]
        counts = [(name, *self._counts(name)) for name, _ in rows]
        standing = {one.tenant: one for one in fair.tenants}
        served = [(name, standing[name]) for name, _ in rows if name in standing]
        families: list[tuple[str, str, str, list[tuple[TenantId, float]]]] = [
            ("running", "gauge", "Sequences with a first token.", [(name, running) for name, running, _ in counts]),
            ("waiting", "gauge", "Sequences without a first token.", [(name, waiting) for name, _, waiting in counts]),
            ("weight", "gauge", "Weight of its share.", [(n, table.by_name[n].share.weight) for n, _ in rows]),
            ("prompt_tokens_total", "counter", "Prompt tokens of sequences that got a first token.",
             [(name, row.prompts) for name, row in rows]),
            ("generation_tokens_total", "counter", "Tokens generated.", [(name, row.outputs) for name, row in rows]),
            ("queue_seconds_total", "counter", "Time that ended sequences waited for their first slice.",
             [(name, row.queue_s) for name, row in rows]),
            ("service_seconds_total", "counter", "Device time charged to it.",
             [(name, one.service_s) for name, one in served]),
            ("starvation_age_seconds", "gauge", "How long its oldest waiting sequence has waited.",
             [(name, one.starving_s) for name, one in served]),
        ]  # fmt: skip
        for family, kind, text, samples in families:
            yield from _head(f"tiercel_tenant_{family}", kind, text)
            for name, value in samples:
                yield f'tiercel_tenant_{family}{{tenant="{name}"}} {value}'
        yield from _head("tiercel_tenant_throttled_total", "counter", "Requests refused, by the limit or goal.")
        for name, row in rows:
            for reason, count in sorted(row.throttled.items()):
                yield f'tiercel_tenant_throttled_total{{reason="{reason}",tenant="{name}"}} {count}'
        yield from _head("tiercel_tenant_ttft_seconds", "histogram", "Arrival to first token.")
        for name, row in rows:
            for limit_s, count in zip(_FIRST_TOKEN_S, row.below, strict=True):
                yield f'tiercel_tenant_ttft_seconds_bucket{{le="{limit_s}",tenant="{name}"}} {count}'
            yield f'tiercel_tenant_ttft_seconds_bucket{{le="+Inf",tenant="{name}"}} {row.first_tokens}'
            yield f'tiercel_tenant_ttft_seconds_sum{{tenant="{name}"}} {row.first_tokens_s}'
            yield f'tiercel_tenant_ttft_seconds_count{{tenant="{name}"}} {row.first_tokens}'


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"


def _no_counts(_name: TenantId) -> tuple[int, int]:
    return 0, 0
