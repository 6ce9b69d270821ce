"""What a run leaves behind: one record a request, samples of the server's metrics, and the result of it all.

Every time is in seconds since the run began, unless its name says otherwise. `RunResult` is the result file: its
fields and, beside them on the top level, the figures (`mean_ttft_ms`, `p99_itl_ms`, ...), as `result_file.py` writes
and reads them.
"""

from msgspec import Struct, field

SCHEMA = 1

METRICS = ("ttft", "tpot", "itl", "e2el", "ttft_due", "e2el_due", "client_queue_time")
"""The latencies with figures. `_due`: counted from when the request was due, not from when it was sent."""

ONLY = "default"
"""The tenant of a run that names none."""


STOPPED = "stopped by the user before its end"
"""The note of a run that was."""


class Goals(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request must keep to count as good, in milliseconds. None: no goal."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None


class RequestRecord(Struct, frozen=True, kw_only=True):
    """One request, as the client saw it."""

    index: int  # place in the plan of the whole run
    tenant: str = ONLY
    due_s: float = 0.0  # when the plan wanted it sent
    sent_s: float = 0.0  # when its first byte was written
    first_s: float | None = None  # the first chunk with content
    end_s: float = 0.0  # the last chunk of the answer (usage and [DONE] are not of it), or the failure
    chunks_s: tuple[float, ...] = ()  # every chunk with content; the first is `first_s`
    input_tokens: int = 0
    output_tokens: int = 0
    wanted_tokens: int = 0  # output tokens asked for
    cached_tokens: int | None = None  # None: the server does not tell
    error: str | None = None  # None: it went well
    status: int | None = None  # HTTP status, once there was one
    conversation: int | None = None
    turn: int = 0
    text: str = ""  # kept with --save-detailed only


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
        return self.after - self.before


class ClientLoad(Struct, frozen=True, kw_only=True):
    """What the run cost the client, and whether the client was the bottleneck."""

    processes: int
    cores: int  # that the client may use
    cpu_s: float  # all client processes, while the run lasted
    busiest_share: float  # of one core, the busiest client process
    chunks: int
    chunks_per_s: float  # mean over the run
    peak_chunks_per_s: float  # best second
    lag_p99_ms: float  # how late the event loop ran what was due
    lag_max_ms: float
    late_sends: int  # requests sent more than 50 ms after they were due although a connection was free
    saturated: bool
    reason: str = ""  # why it is called saturated


class Timeline(Struct, frozen=True, kw_only=True):
    """The run in steps of equal length. Lists run in parallel; step i covers [i * step_s, (i + 1) * step_s)."""

    step_s: float
    output_tokens: list[float]  # generated in the step
    finished: list[int]
    failed: list[int]
    running: list[float]  # requests sent and not ended, at the start of the step
    queued: list[float]  # requests due and not sent, at the start of the step


class TenantResult(Struct, frozen=True, kw_only=True):
    """One tenant's part of the run."""

    name: str
    weight: float
    goals: Goals
    arrivals: str  # in words
    is_timed: bool = True  # its requests have due times of their own; else they are due when there is room
    dataset: str  # in words
    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    request_goodput: float | None = None  # requests per second that kept all goals; None: no goals
    service_tokens: float  # input tokens that were not cached, and output tokens
    share: float  # of the service of all tenants, 0 to 1, while all of them had work
    fair_share: float  # weight over the sum of weights
    largest_gap_s: float  # longest time with work waiting or running and nothing received
    timeline: Timeline
    service: list[float]  # service tokens in each step of the timeline
    figures: dict[str, float | None]
    quantiles: dict[str, list[float]]  # 101 values in ms a metric of METRICS: its 0th to 100th percentile
    errors: dict[str, int]


class Fairness(Struct, frozen=True, kw_only=True):
    """How evenly the server's work went to the tenants, against their weights."""

    jain_index: float  # over service/weight, in the seconds in which every tenant had work
    jain_index_whole_run: float
    contended_s: float  # how long every tenant had work; 0: jain_index is that of the whole run
    largest_gap_s: float
    largest_gap_tenant: str
    largest_difference_tokens: float  # of service/weight between two tenants while both had work


class Isolation(Struct, frozen=True, kw_only=True):
    """One tenant alone, then together with the others. Ratio: together over alone, 1 = undisturbed."""

    tenant: str
    alone: dict[str, float | None]  # figures
    together: dict[str, float | None]
    ratios: dict[str, float]  # by figure: p99_ttft_ms, ...


class RunResult(Struct, frozen=True, kw_only=True):
    """One run: how it was made, what came out, on which machine."""

    # keys that load-test users know
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

    # ours
    schema: int = SCHEMA
    command: list[str]
    seed: int
    versions: dict[str, str]
    machine: dict[str, str]
    settings: dict[str, object]  # every flag with its value; keys are left out
    goals: Goals
    dataset: str  # in words
    arrivals: str  # in words
    notes: list[str]  # what the reader must know: estimated lengths, a saturated client, ...
    errors: dict[str, int]  # failed requests by reason
    client: ClientLoad
    timeline: Timeline
    quantiles: dict[str, list[float]]
    tenants: list[TenantResult]
    fairness: Fairness | None  # None: one tenant
    isolation: list[Isolation] | None
    counters: dict[str, Counter]  # of /metrics, by series; empty when the server has none
    samples: list[Sample]
    requests: list[RequestRecord] = field(default_factory=list)  # with --save-detailed
    figures: dict[str, float | None] = field(
        default_factory=dict
    )  # {mean,median,std,pNN}_{metric}_ms; flat in the file
    metadata: dict[str, str] = field(default_factory=dict)  # --metadata K=V; flat in the file
