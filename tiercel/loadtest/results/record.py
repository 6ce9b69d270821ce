"""The result of a run: a record of each request, samples of the server's metrics, and the summary.

Every time is in seconds since the run began, unless its name says otherwise. `RunResult` is the result file: its
fields and, on the same level, the figures (`mean_ttft_ms`, `p99_itl_ms`, ...), written and read by `result_file.py`.
"""

from msgspec import Struct, field

SCHEMA = 1

METRICS = ("ttft", "tpot", "itl", "e2el", "ttft_due", "e2el_due", "client_queue_time")
"""The latencies with figures. `_due`: counted from when the request was due, not from when it was sent."""

ONLY = "default"
"""Name of the only tenant of a run without a tenants file."""

STOPPED = "stopped by the user before its end"
"""Note of a run that was stopped early."""


class Goals(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Latency limits of a good request, in milliseconds. None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None


class ClientRecord(Struct, frozen=True, kw_only=True):
    """One request, as the client saw it."""

    index: int  # position in the plan of the whole run
    tenant: str = ONLY
    due_s: float = 0.0  # when it was to be sent
    sent_s: float = 0.0  # when it was sent
    first_s: float | None = None  # the first chunk with content
    end_s: float = 0.0  # the last chunk of the answer, without usage and [DONE], or the failure
    chunks_s: tuple[float, ...] = ()  # every chunk with content; the first is `first_s`
    input_tokens: int = 0
    output_tokens: int = 0
    wanted_tokens: int = 0  # output tokens requested
    cached_tokens: int | None = None  # None: not reported by the server
    error: str | None = None  # None: no error
    status: int | None = None  # HTTP status, if there was a response
    conversation: int | None = None
    turn: int = 0
    text: str = ""  # kept only with --save-detailed


class Sample(Struct, frozen=True):
    """One reading of the server's /metrics: values by series, `name{label="value"}`. Histogram buckets are left out."""

    at_s: float
    values: dict[str, float]


class Counter(Struct, frozen=True):
    """A counter of the server before and after the run."""

    before: float
    after: float

    @property
    def delta(self) -> float:
        """Growth over the run."""
        return self.after - self.before


class ClientLoad(Struct, frozen=True, kw_only=True):
    """The load of the client itself, and whether it was the bottleneck."""

    processes: int
    cores: int  # cores that the client may use
    cpu_s: float  # CPU time of all client processes during the run
    busiest_share: float  # of one core, by the busiest client process
    chunks: int
    chunks_per_s: float  # mean over the run
    peak_chunks_per_s: float  # best second
    lag_p99_ms: float  # how late the event loop ran its timers
    lag_max_ms: float
    late_sends: int  # requests sent more than 50 ms after they could have been sent
    saturated: bool
    reason: str = ""  # why `saturated` is set


class Timeline(Struct, frozen=True, kw_only=True):
    """The run in steps of equal length. Element i of each list covers [i * step_s, (i + 1) * step_s)."""

    step_s: float
    output_tokens: list[float]  # generated in the step
    finished: list[int]
    failed: list[int]
    running: list[float]  # requests sent and not ended, at the start of the step
    queued: list[float]  # requests due and not sent, at the start of the step


class TenantResult(Struct, frozen=True, kw_only=True):
    """The result of one tenant."""

    name: str
    weight: float
    goals: Goals
    arrivals: str  # as text
    is_timed: bool = True  # False: a request is due when the closed loop has a place for it
    dataset: str  # as text
    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    request_goodput: float | None = None  # requests per second that kept all goals; None: no goals
    service_tokens: float  # input tokens that were not cached, plus output tokens
    share: float  # of the service of all tenants, 0 to 1, over the time in which all of them had work
    fair_share: float  # weight over the sum of weights
    largest_gap_s: float  # longest time in which the tenant had work and received nothing
    timeline: Timeline
    service: list[float]  # service tokens in each step of the timeline
    figures: dict[str, float | None]
    quantiles: dict[str, list[float]]  # the percentiles 0 to 100 of each metric of METRICS, in ms
    errors: dict[str, int]


class Fairness(Struct, frozen=True, kw_only=True):
    """The fairness of the server: the division of its work among the tenants, by their weights."""

    jain_index: float  # of service/weight, over the time in which every tenant had work
    jain_index_whole_run: float
    contended_s: float  # time in which every tenant had work; 0: jain_index is that of the whole run
    largest_gap_s: float
    largest_gap_tenant: str
    largest_difference_tokens: float  # of service/weight between two tenants over time in which both had work


class Isolation(Struct, frozen=True, kw_only=True):
    """One tenant alone and together with the others. Ratio: together / alone; 1 is undisturbed."""

    tenant: str
    alone: dict[str, float | None]  # figures
    together: dict[str, float | None]
    ratios: dict[str, float]  # by figure: p99_ttft_ms, ...


class RunResult(Struct, frozen=True, kw_only=True):
    """The result of a run, with its settings and the machine."""

    # keys that other load tests use, too
    date: str
    backend: str
    label: str | None
    model_id: str
    tokenizer_id: str | None
    num_prompts: int
    request_rate: float | str  # a number or "inf"
    burstiness: float
    max_concurrency: int | None
    duration: float
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    request_goodput: float | None
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float
    max_concurrent_requests: int

    # keys of tiercel
    schema: int = SCHEMA
    command: list[str]
    seed: int
    versions: dict[str, str]
    machine: dict[str, str]
    settings: dict[str, object]  # every flag with its value, without API keys
    goals: Goals
    dataset: str  # as text
    arrivals: str  # as text
    notes: list[str]  # warnings for the reader: estimated lengths, a saturated client, ...
    errors: dict[str, int]  # failed requests by reason
    client: ClientLoad
    timeline: Timeline
    quantiles: dict[str, list[float]]
    tenants: list[TenantResult]
    fairness: Fairness | None  # None: one tenant
    isolation: list[Isolation] | None
    counters: dict[str, Counter]  # of /metrics, by series; empty if the server has none
    samples: list[Sample]
    requests: list[ClientRecord] = field(default_factory=list)  # with --save-detailed
    figures: dict[str, float | None] = field(
        default_factory=dict
    )  # {mean,median,std,pNN}_{metric}_ms; flat in the file
    metadata: dict[str, str] = field(default_factory=dict)  # --metadata K=V; flat in the file
