"""Numbers for Prometheus, under vLLM's names where the meaning is the same."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from server.client import SequenceFacts
from server.tenant_metrics import TenantMetrics
from server.tier_metrics import TierMetrics
from tiercel.ids import TenantId
from tiercel.outcome import Finished, FinishReason, Gauges
from tiercel.wire import Ready

_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_TOKEN_GAP_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_CHOICES = (1, 2, 5, 10, 20)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_HTTP_S = (0.1, 0.5, 1)
_LABELS = ("model_name", "engine")


def _token_buckets(longest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 … up to the model's length."""
    series = [digit * 10**power for power in range(9) for digit in (1, 2, 5)]
    return tuple(count for count in series if count <= longest) or (1,)


class ServerMetrics:
    """One registry an app. Engine metrics start when the engine is ready: their buckets depend on its context."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self._engine: EngineMetrics | None = None
        self.tenants = TenantMetrics()
        registry = self._registry
        self._http_requests = Counter(
            "http_requests", "Requests by handler and status class.", ("method", "handler", "status"), registry=registry
        )
        self._http_seconds = Histogram(
            "http_request_duration_seconds", "Time to the end of the response.", ("method", "handler"),
            buckets=_HTTP_S, registry=registry,
        )  # fmt: skip
        self._rejections = Counter(
            "vllm:admission_rejections", "Requests refused before any work.", (*_LABELS, "reason"), registry=registry
        )
        self._stream_errors = Counter(
            "tiercel_stream_errors", "Generations that ended in an error.", ("reason",), registry=registry
        )

    def on_http(self, method: str, handler: str, status: int, seconds: float) -> None:
        """One HTTP request has ended."""
        self._http_requests.labels(method, handler, f"{status // 100}xx").inc()
        self._http_seconds.labels(method, handler).observe(seconds)

    def on_rejected(self, reason: str) -> None:
        """A request was refused by admission."""
        self._rejections.labels(self._model_name, "0", reason).inc()

    def on_throttled(self, tenant: TenantId, reason: str) -> None:
        """A request was refused for a limit or a goal of its tenant."""
        self.tenants.on_throttled(tenant, reason)

    def on_tenants_refused(self) -> None:
        """A tenants file or request was wrong."""
        self.tenants.on_refused_table()

    def on_stream_error(self, reason: str) -> None:
        """A generation ended in an error."""
        self._stream_errors.labels(reason).inc()

    def on_ready(self, ready: Ready) -> None:
        """The engine serves: its metrics exist from now on."""
        self._engine = EngineMetrics(self._registry, self._model_name, ready)

    def on_token(self, facts: SequenceFacts, now_s: float, gap_s: float | None) -> None:
        """A sequence got a token; `gap_s` is None for its first."""
        self.tenants.on_token(facts, now_s, gap_s)
        if self._engine is not None:
            self._engine.on_token(facts, now_s, gap_s)

    def on_finished(self, facts: SequenceFacts, finished: Finished, now_s: float) -> None:
        """A sequence ended."""
        self.tenants.on_finished(facts, finished)
        if self._engine is not None:
            self._engine.on_finished(facts, finished, now_s)

    def on_step(self, before: Gauges, after: Gauges) -> None:
        """A step was committed."""
        self.tenants.on_step(after)
        if self._engine is not None:
            self._engine.on_step(before, after)

    def exposition(self) -> bytes:
        """Prometheus text. Safe in another thread than the one that counts."""
        return generate_latest(self._registry) + self.tenants.exposition()


class EngineMetrics:
    """The `vllm:` family."""

    def __init__(self, registry: CollectorRegistry, model_name: str, ready: Ready) -> None:
        self._registry = registry
        self._label_values = (model_name, "0")
        self._tiers = TierMetrics(model_name)
        registry.register(self._tiers)
        lengths = _token_buckets(ready.max_model_len)
        self._running = self._gauge("num_requests_running", "Sequences in the running batch.")
        self._waiting = self._gauge("num_requests_waiting", "Sequences waiting for their first slice or preempted.")
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Share of KV blocks in use; cached-but-free do not count.")
        by_reason = Gauge(
            "vllm:num_requests_waiting_by_reason", "Waiting sequences by reason.", (*_LABELS, "reason"),
            registry=registry,
        )  # fmt: skip
        self._waiting_for_capacity = by_reason.labels(*self._label_values, "capacity")
        by_reason.labels(*self._label_values, "deferred").set(0)  # nothing waits for another reason
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of sequences that got a first token.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        self._prefix_queries = self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self._prefix_hits = self._counter("prefix_cache_hits", "Tokens found in the prefix cache.")
        self._preemptions = self._counter("num_preemptions", "Preemptions.")
        by_source = Counter(
            "vllm:prompt_tokens_by_source", "Prompt tokens by where they came from.", (*_LABELS, "source"),
            registry=registry,
        )  # fmt: skip
        self._computed_here = by_source.labels(*self._label_values, "local_compute")
        self._hit_here = by_source.labels(*self._label_values, "local_cache_hit")
        success = Counter(
            "vllm:request_success", "Sequences by how they ended.", (*_LABELS, "finished_reason"), registry=registry
        )
        self._ends = {reason: success.labels(*self._label_values, reason.value) for reason in FinishReason}
        self._first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_S)
        self._gap = self._histogram("inter_token_latency_seconds", "Between two tokens.", _TOKEN_GAP_S)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean gap of a sequence.", _TOKEN_GAP_S
        )
        self._end_to_end = self._histogram("e2e_request_latency_seconds", "Arrival to end.", _REQUEST_S)
        self._queued = self._histogram("request_queue_time_seconds", "Arrival to first slice.", _REQUEST_S)
        self._inference = self._histogram("request_inference_time_seconds", "First slice to end.", _REQUEST_S)
        self._prefill = self._histogram("request_prefill_time_seconds", "First slice to first token.", _REQUEST_S)
        self._decode = self._histogram("request_decode_time_seconds", "First to last token.", _REQUEST_S)
        self._num_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a sequence.", lengths)
        self._num_outputs = self._histogram("request_generation_tokens", "Tokens generated by a sequence.", lengths)
        self._max_outputs = self._histogram(
            "request_max_num_generation_tokens", "Most tokens of any choice of a request.", lengths
        )
        self._computed_prompt = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens not found in the cache.", lengths
        )
        self._params_n = self._histogram("request_params_n", "Choices asked for.", _CHOICES)
        self._params_max_tokens = self._histogram("request_params_max_tokens", "max_tokens asked for.", lengths)
        self._step_tokens = self._histogram("iteration_tokens_total", "Tokens a step.", _STEP_TOKENS)
        self._num_preemptions = self._histogram("request_num_preemptions", "Preemptions of a sequence.", _PREEMPTIONS)
        self._set_cache_facts(ready)

    def on_token(self, facts: SequenceFacts, now_s: float, gap_s: float | None) -> None:
        """A sequence got a token."""
        self._generation_tokens.inc()
        if gap_s is None:
            self._first_token.observe(now_s - facts.arrival_s)
            self._prompt_tokens.inc(facts.start.num_prompt)
        else:
            self._gap.observe(gap_s)

    def on_finished(self, facts: SequenceFacts, finished: Finished, now_s: float) -> None:
        """A sequence ended."""
        self._ends[finished.reason].inc()
        self._end_to_end.observe(now_s - facts.arrival_s)
        self._queued.observe(finished.queued_s)
        self._inference.observe(finished.prefill_s + finished.decode_s)
        self._prefill.observe(finished.prefill_s)
        self._decode.observe(finished.decode_s)
        self._num_prompt.observe(facts.start.num_prompt)
        self._num_outputs.observe(facts.num_outputs)
        self._max_outputs.observe(facts.num_outputs)
        self._params_max_tokens.observe(facts.start.params.max_tokens)
        self._num_preemptions.observe(finished.preemptions)
        if facts.start.n is not None:
            self._params_n.observe(facts.start.n)
        if facts.num_outputs > 1:
            self._per_token.observe(finished.decode_s / (facts.num_outputs - 1))
        if facts.first_token_s is not None:
            computed = facts.start.num_prompt - finished.num_cached
            self._computed_prompt.observe(computed)
            self._computed_here.inc(computed)
            self._hit_here.inc(finished.num_cached)
            self._cached_tokens.inc(finished.num_cached)

    def on_step(self, before: Gauges, after: Gauges) -> None:
        """A step was committed. `step_tokens` counts prompt tokens computed and tokens brought."""
        self._tiers.on_step(after)
        self._running.set(after.num_running)
        self._waiting.set(after.num_waiting)
        self._waiting_for_capacity.set(after.num_waiting)
        self._kv_usage.set(after.blocks_used / after.blocks_total if after.blocks_total else 0.0)
        self._prefix_queries.inc(max(after.prefix_queries - before.prefix_queries, 0))
        self._prefix_hits.inc(max(after.prefix_hits - before.prefix_hits, 0))
        self._preemptions.inc(max(after.preemptions - before.preemptions, 0))
        if after.steps != before.steps and after.step_tokens > 0:
            self._step_tokens.observe(after.step_tokens)

    def _set_cache_facts(self, ready: Ready) -> None:
        pool_tokens = ready.blocks_total * ready.block_size
        labels = {
            "block_size": str(ready.block_size),
            "num_gpu_blocks": str(ready.blocks_total),
            "kv_cache_size_tokens": str(pool_tokens),
            "kv_cache_max_concurrency": f"{pool_tokens / max(ready.max_model_len, 1):.2f}",
            "cache_dtype": ready.dtype,
        }
        facts = Gauge("vllm:cache_config_info", "Facts of the KV cache.", (*_LABELS, *labels), registry=self._registry)
        facts.labels(*self._label_values, *labels.values()).set(1)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, _LABELS, registry=self._registry).labels(*self._label_values)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, _LABELS, registry=self._registry).labels(*self._label_values)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(f"vllm:{name}", text, _LABELS, registry=self._registry, buckets=buckets)
        return histogram.labels(*self._label_values)
