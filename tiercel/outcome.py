"""Facts: what a step brought, and how a request ended."""

import enum

from msgspec import Struct

from tiercel.ids import SeqId, TenantId
from tiercel.plan import PreemptionReason
from tiercel.tier import Route, Tier


class FinishReason(enum.Enum):
    """How a sequence ended. Every accepted request ends in exactly one."""

    STOP = "stop"  # an end-of-sequence or stop token, or a stop string found by the HTTP process
    LENGTH = "length"  # max_tokens or the model's context
    ABORT = "abort"  # the client went away
    ERROR = "error"  # the engine failed this request; `Finished.error` says how


class TokenLogprobs(Struct, frozen=True, gc=False):
    """Natural log-probabilities, before temperature, penalties and filters, at one position."""

    seq: SeqId
    token: int
    logprob: float  # of the sampled token
    rank: int  # of the sampled token, from 1
    top_tokens: tuple[int, ...]  # likeliest first
    top_logprobs: tuple[float, ...]


class Finished(Struct, frozen=True, kw_only=True):
    """The end of one sequence; `stop_token` is in the outputs but not in the text."""

    seq: SeqId
    reason: FinishReason
    num_prompt: int  # tokens
    num_outputs: int  # tokens
    num_cached: int  # prompt tokens that were prefix hits when first admitted
    preemptions: int = 0
    queued_s: float = 0.0  # arrival to first slice launched
    prefill_s: float = 0.0  # first slice launched to first token
    decode_s: float = 0.0  # first token to last token
    stop_token: int | None = None
    error: str | None = None


class StepOutcome(Struct, frozen=True):
    """What the runner brings home from one launched step: one row per slice that samples.

    `tokens[i]` belongs to the i-th sampling slice of the plan, in order.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    bad: tuple[int, ...] = ()  # sampling slices whose logits were not finite: their requests fail, no other does
    nano_batch_ms: tuple[float, ...] = ()  # measured, one a nano-batch; 0: all its sequences had gone. () on a GPU


class TierGauges(Struct, frozen=True, kw_only=True, gc=False):
    """One tier in numbers. Where one RAM arena is device and host tier in one, it is told as HBM alone."""

    tier: Tier
    block_bytes: int = 0
    blocks_total: int = 0
    blocks_used: int = 0  # owned by a table or a transfer, or in limbo
    blocks_cached: int = 0  # valid copies that may be evicted
    hit_tokens: int = 0  # prompt tokens whose best copy lay here, since start
    missed_tokens: int = 0  # prompt tokens looked up here and not found, since start
    evictions: int = 0  # blocks, since start
    mean_run_blocks: float = 0.0  # consecutive slots taken at once, mean since start


class RouteGauges(Struct, frozen=True, kw_only=True, gc=False):
    """One way of a copy in numbers, since start. Bytes, blocks and copies count what landed."""

    route: Route
    transfers: int = 0
    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0  # spent copying, by whatever copied; overlaps with computing
    copies: int = 0  # after neighbours were merged
    failures: int = 0
    late: int = 0
    misses: int = 0  # bytes that were not what the key promised


class TenantGauges(Struct, frozen=True, kw_only=True, gc=False):
    """One tenant in the eyes of the scheduler."""

    tenant: TenantId
    service_s: float = 0.0  # device time charged to it, since start
    starving_s: float = 0.0  # how long its oldest waiting sequence has waited


class FairGauges(Struct, frozen=True, kw_only=True):
    """How fair it was in the last minute, among the tenants that wanted service all the while."""

    jain: float = 1.0  # over service by weight
    gap_s: float = 0.0  # largest difference of service by weight
    tenants: tuple[TenantGauges, ...] = ()


class DiskState(enum.Enum):
    """How the SSD tier does."""

    NONE = "none"  # not asked for
    ON = "on"
    READ_ONLY = "read_only"  # writes failed, or the day's bytes are spent for good
    OFF = "off"  # too many calls hang or fail


class Gauges(Struct, frozen=True, kw_only=True, gc=False):
    """The engine's books in numbers, at the end of a step."""

    num_running: int = 0
    num_waiting: int = 0  # for their first slice, or to come back
    num_preempted: int = 0  # of them: admitted before
    blocks_total: int = 0
    blocks_used: int = 0  # referenced by a sequence, or in limbo; cached-but-free blocks do not count
    blocks_cached: int = 0  # evictable prefix-cache blocks
    step_tokens: int = 0  # prompt tokens computed and tokens sampled by the step; 0: nothing to observe
    prefix_queries: int = 0  # tokens looked up, since start
    prefix_hits: int = 0  # tokens found, since start
    preemptions: int = 0  # since start
    steps: int = 0  # committed since start
    preemptions_swap: int = 0  # of the preemptions: blocks were kept in another tier
    preemptions_recompute: int = 0  # of the preemptions: blocks were dropped
    swapped_tokens: int = 0  # that came back from another tier after a preemption, since start
    recomputed_tokens: int = 0  # that were computed once more after a preemption, since start
    tiers: tuple[TierGauges, ...] = ()
    routes: tuple[RouteGauges, ...] = ()
    disk_state: DiskState = DiskState.NONE
    preemptions_by_reason: dict[PreemptionReason, int] = {}
    fair: FairGauges | None = None  # told now and then
