"""The metrics of the server, and the text of /metrics."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tiercel.server.client.crash_book import DeathKind
from tiercel.server.client.sequences import SequenceFacts
from tiercel.server.client.status import EngineState
from tiercel.server.metrics.batches import BatchFigures, BatchMetrics
from tiercel.server.metrics.config import ConfigMetrics
from tiercel.server.metrics.engine import ENGINE, EngineMetrics, EngineMetricsSample
from tiercel.server.metrics.exposition import joined
from tiercel.server.metrics.fleet import FleetMetrics, RemoteEngine
from tiercel.server.metrics.responses import ResponseMetrics
from tiercel.server.metrics.steps import StepMetrics
from tiercel.server.metrics.tenants import Counts, TenantMetrics, Waits
from tiercel.server.metrics.tiers import TierMetrics
from tiercel.values.ids import TenantId
from tiercel.values.outcome import Finished, Gauges
from tiercel.wire.frames import Ready

_HTTP_S = (0.1, 0.5, 1)
_POSTS = (
    *("/v1/chat/completions", "/v1/chat/completions/{id}", "/v1/completions"),
    *("/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/messages/batches", "/v1/messages/batches/{batch_id}/cancel"),
    *("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"),
    *("/v1/conversations", "/v1/conversations/{id}", "/v1/conversations/{id}/items"),
    *("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact", "/v1/responses/{id}/cancel"),
    *("/tokenize", "/detokenize", "/v1/files", "/v1/batches", "/v1/batches/{batch_id}/cancel"),
)
_REJECTIONS = (
    *("queue_full", "deadline", "shutting_down", "body_memory", "answer_memory"),
    *("tenant_requests", "tenant_tokens", "tenant_concurrency", "tenant_queue_share"),
)
_STREAM_ERRORS = ("engine_error", "engine_crashed", "engine_dead", "shutting_down")
_DEATHS = tuple(kind.value for kind in DeathKind)


class EngineHealth(Protocol):
    """The state of the engine and the time since its last report."""

    @property
    def state(self) -> EngineState: ...
    def silence_s(self) -> float: ...


class ServerMetrics:
    """The counters of the server, and their output for Prometheus."""

    def __init__(self, model_name: str) -> None:
        self._registry = registry = CollectorRegistry()
        self._model_name = model_name
        self._engine: EngineMetrics | None = None
        self._steps = StepMetrics()
        self._tiers = TierMetrics(model_name)
        self.tenants = TenantMetrics()
        self.config = ConfigMetrics(self._registry)
        self.responses = ResponseMetrics(self._registry)
        self._http_requests = Counter(
            "http_requests",
            "Requests by handler and status class; `none`: no route, or refused by the transport.",
            ("method", "handler", "status"),
            registry=registry,
        )
        self._http_seconds = Histogram(
            "http_request_duration_seconds", "Time to the end of the response.", ("method", "handler"),
            buckets=_HTTP_S, registry=registry,
        )  # fmt: skip
        self._rejections = Counter(
            "vllm:admission_rejections", "Requests refused before any work.", ("model_name", "engine", "reason"),
            registry=registry,
        )  # fmt: skip
        self._timeouts = Counter(
            "tiercel_timeouts", "Requests ended by a time limit.", ("limit", "stage"), registry=registry
        )
        self._stream_errors = Counter(
            "tiercel_stream_errors", "Generations that ended in an error.", ("reason",), registry=registry
        )
        self._grammar_errors = Counter(
            "tiercel_grammar_errors",
            "Generations that ended because their grammar could not be compiled or applied, or no token was left to"
            " draw.",
            registry=registry,
        )
        self._tasks = Gauge("tiercel_http_tasks", "Asyncio tasks of the HTTP process.", registry=registry)
        self._restarts = Counter(
            "tiercel_engine_restarts", "Deaths of the engine, by how it ended.", ("reason",), registry=registry
        )
        self._resumed = Counter(
            "tiercel_resumed_sequences", "Sequences that a new engine has continued.", registry=registry
        )
        self._resumed_tokens = Counter(
            "tiercel_resumed_tokens", "Tokens, prompt and output, of the sequences that a new engine has continued.",
            registry=registry,
        )  # fmt: skip
        self._resumed_found = Counter(
            "tiercel_resumed_cached_tokens", "Tokens of these that a new engine has found in the cache.",
            registry=registry,
        )  # fmt: skip
        for reason in _DEATHS:
            self._restarts.labels(reason)
        for handler in _POSTS:  # `increase` does not see the first event of a series without an earlier sample
            self._http_requests.labels("POST", handler, "5xx")
        for reason in _REJECTIONS:
            self._rejections.labels(model_name, ENGINE, reason)
        for limit in ("timeout", "read_timeout", "request_timeout"):
            for stage in ("waiting", "running"):
                self._timeouts.labels(limit, stage)
        self._timeouts.labels("queue_timeout", "waiting")
        for reason in _STREAM_ERRORS:
            self._stream_errors.labels(reason)
        ProcessCollector(registry=registry)

    def open(self, health: EngineHealth, counts: Counts, waits: Waits, queue_limit: Callable[[], int]) -> None:
        """Set the sources that are read at a scrape: engine health, running and waiting sequences, queue limit."""
        self._registry.register(_HealthMetrics(health, queue_limit))
        self.tenants.open(counts, waits)

    def open_bodies(self, held_bytes: Callable[[], int], limit_bytes: Callable[[], int]) -> None:
        """Set the sources of the memory of bodies that are not admitted yet."""
        self._registry.register(_BodyMetrics(held_bytes, limit_bytes))

    def open_batches(self, figures: BatchFigures) -> None:
        """Set the source of the numbers of files and batches."""
        self._registry.register(BatchMetrics(figures))

    def open_fleet(self, engines: Callable[[], Sequence[RemoteEngine]]) -> None:
        """Set the source of the metrics of each engine of a front."""
        self._registry.register(FleetMetrics(engines))

    def watch_engine(self, pid: Callable[[], int]) -> None:
        """Add memory, CPU time and start time of the engine process."""
        ProcessCollector(namespace="tiercel_engine", pid=pid, registry=self._registry)

    def on_http(self, method: str, handler: str, status: int, seconds: float) -> None:
        """Count an HTTP request at its end."""
        self._http_requests.labels(method, handler, f"{status // 100}xx").inc()
        self._http_seconds.labels(method, handler).observe(seconds)

    def on_refused(self, status: int) -> None:
        """Count a request that was refused before its handler was known."""
        self._http_requests.labels("other", "none", f"{status // 100}xx").inc()

    def on_scrape(self, num_tasks: int) -> None:
        """Record the number of tasks; called on the event loop, because other threads must not count them."""
        self._tasks.set(num_tasks)

    def on_rejected(self, reason: str) -> None:
        """Count a request that admission refused."""
        self._rejections.labels(self._model_name, ENGINE, reason).inc()

    def on_throttled(self, tenant: TenantId, reason: str) -> None:
        """Count a request refused because of its tenant's limit or goal."""
        self.tenants.on_throttled(tenant, reason)

    def on_tenants_refused(self) -> None:
        """Count a refused tenants document."""
        self.tenants.on_refused_table()

    def on_stream_error(self, reason: str) -> None:
        """Count a generation that ended in an error."""
        self._stream_errors.labels(reason).inc()

    def on_grammar_error(self) -> None:
        """Count a generation whose grammar could not be compiled or applied."""
        self._grammar_errors.inc()

    def on_timeout(self, limit: str, *, has_tokens: bool) -> None:
        """Count a request that a time limit ended, before or after its first token."""
        self._timeouts.labels(limit, "running" if has_tokens else "waiting").inc()

    def on_engine_death(self, kind: str) -> None:
        """Count the death of an engine."""
        self._restarts.labels(kind).inc()

    def on_resumed(self, tokens: int, num_found: int) -> None:
        """Count a sequence that a new engine has continued, and what the cache had of its tokens."""
        self._resumed.inc()
        self._resumed_tokens.inc(tokens)
        self._resumed_found.inc(min(num_found, tokens))

    def on_ready(self, ready: Ready) -> None:
        """Create the metrics of the engine. If the engine was restarted, record that."""
        if self._engine is None:
            self._engine = EngineMetrics(self._model_name, ready)
            self._registry.register(self._steps)
            self._registry.register(self._tiers)
        else:
            self._engine.on_restart(ready)

    def on_first_token(self, facts: SequenceFacts, now_s: float) -> None:
        """Record the first token of a sequence."""
        self.tenants.on_first_token(facts, now_s)
        if self._engine is not None:
            self._engine.on_first_token(facts, now_s)

    def on_tokens(self, tenant: TenantId, count: int, gap_s: float) -> None:
        """Record later tokens of as many sequences of a tenant, each `gap_s` after the token before."""
        self.tenants.on_tokens(tenant, count, gap_s)
        if self._engine is not None:
            self._engine.on_tokens(count, gap_s)

    def on_finished(self, facts: SequenceFacts, finished: Finished, now_s: float) -> None:
        """Record the end of a sequence."""
        self.tenants.on_finished(facts, finished)
        if self._engine is not None:
            self._engine.on_finished(facts, finished, now_s)

    def on_step(self, gauges: Gauges) -> None:
        """Record a committed step."""
        self.tenants.on_step(gauges)
        self._steps.on_step(gauges)
        self._tiers.on_step(gauges)
        if self._engine is not None:
            self._engine.on_step(gauges)

    def sample(self) -> EngineMetricsSample:
        """Return the counts over all sequences."""
        return EngineMetricsSample() if self._engine is None else self._engine.sample()

    def exposition(self, *, has_detail: bool = False) -> bytes:
        """Return Prometheus text. `has_detail`: see `TenantMetrics`. May run in another thread than the updates."""
        server = (generate_latest(_WithoutCreated(family)).decode() for family in self._registry.collect())
        engine = "" if self._engine is None else self._engine.exposition()
        return (joined(server) + engine + self.tenants.exposition(has_detail=has_detail)).encode()


class _HealthMetrics(Collector):
    """Metrics that are read at a scrape, because the counters of a hung engine do not change."""

    def __init__(self, health: EngineHealth, queue_limit: Callable[[], int]) -> None:
        self._health = health
        self._queue_limit = queue_limit

    def collect(self) -> Iterator[Metric]:
        """Yield the families of engine state, engine silence and queue limit."""
        current = self._health.state
        states = GaugeMetricFamily(
            "tiercel_engine_state", "State of the engine: 1 for the current state.", labels=("state",)
        )
        for state in EngineState:
            states.add_metric((state.value,), float(state is current))
        yield states
        yield GaugeMetricFamily(
            "tiercel_engine_silence_seconds", "Seconds since the engine's last report while it has work.",
            self._health.silence_s(),
        )  # fmt: skip
        yield GaugeMetricFamily("tiercel_queue_limit", "Maximum number of waiting sequences.", self._queue_limit())


class _BodyMetrics(Collector):
    """The memory of request bodies that are not admitted yet."""

    def __init__(self, held_bytes: Callable[[], int], limit_bytes: Callable[[], int]) -> None:
        self._held_bytes = held_bytes
        self._limit_bytes = limit_bytes

    def collect(self) -> Iterator[Metric]:
        """Yield the families of the bytes and of their limit."""
        yield GaugeMetricFamily(
            "tiercel_pending_body_bytes", "Memory of request bodies that are not admitted yet.", self._held_bytes()
        )
        yield GaugeMetricFamily(
            "tiercel_pending_body_limit_bytes", "Maximum memory of request bodies that are not admitted yet.",
            self._limit_bytes(),
        )  # fmt: skip


class _WithoutCreated(Collector):
    """A metric family without `_created` samples, which would double its lines."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        """Yield the family without `_created`."""
        samples = [sample for sample in self._family.samples if not sample.name.endswith("_created")]
        self._family.samples = samples
        yield self._family
