"""The dashboard snapshot: the JSON that the page at /ui reads. Numbers and names, never text of prompts or answers.

Sums count since the start; the page takes differences. Every list is bounded, and a count says how many there are.
"""

from typing import Literal

from msgspec import Struct

RequestState = Literal["waiting", "restoring", "prefill", "decode", "draining", "preempted"]


class EngineSnapshot(Struct, frozen=True, kw_only=True):
    """The engine and its state."""

    state: str  # loading | ready | restarting | failed | dead
    stage: str  # of loading
    is_stalled: bool
    is_draining: bool
    model: str
    device: str | None  # None until the engine is ready, as the three below
    dtype: str | None
    block_tokens: int | None
    context_tokens: int | None


class ViewerSnapshot(Struct, frozen=True, kw_only=True):
    """The viewer. A tenant sees its own requests and how full the server is; the operator sees all."""

    role: Literal["operator", "tenant"]
    tenant: str | None  # of the requests of this key; None for an admin key, which makes none
    has_chat: bool  # the model has a chat template


class QueueSnapshot(Struct, frozen=True, kw_only=True):
    """Sequences of all tenants, as the engine counts them."""

    running: int
    waiting: int
    preempted: int  # included in waiting


class HistogramSnapshot(Struct, frozen=True):
    """A histogram as in Prometheus: `counts[i]` values were at most `bounds[i]` seconds; the last is the total."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]


class WorkSnapshot(Struct, frozen=True, kw_only=True):
    """Work done for the tenants that the viewer may see. None: not shown to this viewer."""

    prompt_tokens: float
    generation_tokens: float
    cached_tokens: float | None
    finished: float | None  # sequences
    swaps: int | None  # preemptions with the blocks kept
    recomputes: int | None  # preemptions with the blocks dropped
    first_token: HistogramSnapshot
    gap: HistogramSnapshot | None
    queue: HistogramSnapshot | None


class TenantBytes(Struct, frozen=True, kw_only=True):
    """The bytes of one tenant in a tier."""

    name: str
    used: int  # a block that several of its sequences share counts once
    cached: int


class TierSnapshot(Struct, frozen=True, kw_only=True):
    """One tier, in bytes, with its largest tenants. None: not shown to this viewer."""

    tier: str  # hbm | ddr | ssd
    capacity: int
    used: int
    cached: int
    block: int
    hit_tokens: int | None
    missed_tokens: int | None
    evictions: int | None
    tenants: list[TenantBytes]


class RouteSnapshot(Struct, frozen=True, kw_only=True):
    """Copies from one tier to another."""

    route: str
    blocks: int
    bytes: int
    seconds: float
    failures: int
    late: int


class TenantSnapshot(Struct, frozen=True, kw_only=True):
    """One tenant and the service it gets."""

    name: str
    weight: float
    band: int
    running: int
    waiting: int
    prompt_tokens: int
    generation_tokens: int
    service_s: float  # device time charged to it
    starving_s: float
    fair_share: float  # of its band, among the tenants that want service now; 0 if it wants none


class BandSnapshot(Struct, frozen=True, kw_only=True):
    """The totals of one band."""

    band: int
    service_s: float
    generation_tokens: int  # of the tenants that the viewer may see


class TenantsSnapshot(Struct, frozen=True, kw_only=True):
    """The busiest tenants, and the fairness of the last minute."""

    rows: list[TenantSnapshot]
    seen: int  # tenants that have sent a request and that the viewer may see
    bands: list[BandSnapshot]
    jain: float | None  # None if fewer than two tenants competed, and for a tenant; likewise gap_s
    gap_s: float | None


class RequestSnapshot(Struct, frozen=True, kw_only=True):
    """One sequence whose client has not left."""

    seq: int
    tenant: str
    band: int
    state: RequestState
    prompt_tokens: int
    computed_tokens: int | None  # None until the engine reports it
    output_tokens: int
    most_outputs: int
    age_s: float
    ttft_s: float | None
    gap_s: float | None  # mean of the gaps between its tokens
    preemptions: int


class RequestsSnapshot(Struct, frozen=True, kw_only=True):
    """Running sequences, then waiting ones, each oldest first."""

    rows: list[RequestSnapshot]
    running: int
    waiting: int


class DashboardSnapshot(Struct, frozen=True, kw_only=True):
    """The whole snapshot, at one moment of the server's monotonic clock."""

    at_s: float
    version: str
    engine: EngineSnapshot
    viewer: ViewerSnapshot
    queue: QueueSnapshot
    work: WorkSnapshot
    tiers: list[TierSnapshot]
    disk_state: str
    routes: list[RouteSnapshot]
    tenants: TenantsSnapshot
    requests: RequestsSnapshot


class PastHistogram(Struct, frozen=True):
    """A histogram at several moments; `counts` as in `HistogramSnapshot`, and empty before the engine was ready."""

    bounds: tuple[float, ...]
    counts: list[tuple[int, ...]]


class PastWork(Struct, frozen=True, kw_only=True):
    """The work for all tenants at several moments."""

    prompt_tokens: list[int]
    generation_tokens: list[int]
    first_token: PastHistogram
    gap: PastHistogram


class PastSnapshot(Struct, frozen=True, kw_only=True):
    """The last ten minutes, oldest moment first: what the charts of the page begin with."""

    at_s: list[float]
    running: list[int]
    waiting: list[int]
    preempted: list[int]
    work: PastWork | None  # None: not shown to this viewer
