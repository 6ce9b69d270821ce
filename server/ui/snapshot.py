"""What the page at /ui is told, twice a second and more: numbers and names, never text of prompts or answers.

Sums count since the start; the page takes differences. Every list is bounded, and counts say what it leaves out.
"""

from typing import Literal

from msgspec import Struct

RequestState = Literal["waiting", "restoring", "prefill", "decode", "draining", "preempted"]


class EngineSnapshot(Struct, frozen=True, kw_only=True):
    """Who answers, and how it is."""

    state: str  # loading | ready | failed | dead
    stage: str  # of loading
    is_stalled: bool
    is_draining: bool
    model: str
    device: str | None  # this and below: None until it is ready
    dtype: str | None
    block_tokens: int | None
    context_tokens: int | None


class ViewerSnapshot(Struct, frozen=True, kw_only=True):
    """Who looks. A tenant sees its own requests and how full the server is; the operator sees all."""

    role: Literal["operator", "tenant"]
    tenant: str | None  # whose requests this key makes; None: an admin key makes none
    has_chat: bool  # the model has a chat template


class QueueSnapshot(Struct, frozen=True, kw_only=True):
    """Sequences of everybody, as the engine counts them."""

    running: int
    waiting: int
    preempted: int  # of the waiting


class HistogramSnapshot(Struct, frozen=True):
    """As in Prometheus: `counts[i]` values were at most `bounds[i]` seconds, and the last count is of all."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]


class WorkSnapshot(Struct, frozen=True, kw_only=True):
    """What was done for whom the viewer may see. None: not told to this viewer."""

    prompt_tokens: float
    generation_tokens: float
    cached_tokens: float | None
    finished: float | None  # sequences
    swaps: int | None  # preemptions that kept the blocks
    recomputes: int | None  # preemptions that dropped them
    first_token: HistogramSnapshot
    gap: HistogramSnapshot | None
    queue: HistogramSnapshot | None


class TenantBytes(Struct, frozen=True, kw_only=True):
    """What one tenant has in a tier."""

    name: str
    used: int  # a block that several of its sequences share counts once
    cached: int


class TierSnapshot(Struct, frozen=True, kw_only=True):
    """One tier, in bytes; the largest tenants alone. None: not told to this viewer."""

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
    """One way of a copy between tiers."""

    route: str
    blocks: int
    bytes: int
    seconds: float
    failures: int
    late: int


class TenantSnapshot(Struct, frozen=True, kw_only=True):
    """One tenant and what it is served."""

    name: str
    weight: float
    band: int
    running: int
    waiting: int
    prompt_tokens: int
    generation_tokens: int
    service_s: float  # device time charged to it
    starving_s: float
    fair_share: float  # of its band, among those that want service now; 0: it wants none


class BandSnapshot(Struct, frozen=True, kw_only=True):
    """All tenants of one band together."""

    band: int
    service_s: float
    generation_tokens: int  # of those that the viewer may see


class TenantsSnapshot(Struct, frozen=True, kw_only=True):
    """The busiest tenants, and how fair it was in the last minute."""

    rows: list[TenantSnapshot]
    seen: int  # tenants that have asked for anything, as far as the viewer may know
    bands: list[BandSnapshot]
    jain: float | None  # None: fewer than two competed, or not told to this viewer; so is the gap
    gap_s: float | None


class RequestSnapshot(Struct, frozen=True, kw_only=True):
    """One sequence whose client listens."""

    seq: int
    tenant: str
    band: int
    state: RequestState
    prompt_tokens: int
    computed_tokens: int | None  # None: the engine has not told
    output_tokens: int
    most_outputs: int
    age_s: float
    ttft_s: float | None
    gap_s: float | None  # mean of the gaps between its tokens
    preemptions: int


class RequestsSnapshot(Struct, frozen=True, kw_only=True):
    """Those that run, then those that wait, oldest first."""

    rows: list[RequestSnapshot]
    running: int
    waiting: int


class DashboardSnapshot(Struct, frozen=True, kw_only=True):
    """Everything at one moment of the server's steady clock."""

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
