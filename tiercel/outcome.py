"""Facts: what a step brought, and how a request ended."""

import enum
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from tiercel.ids import SeqId, TenantId
from tiercel.plan import PreemptionReason
from tiercel.tier import Route, Tier

MOST_ABSENCES = 32  # told of one sequence

BAD_LOGITS = "the model's logits are not finite"
"""`Finished.error` of a sequence whose logits were NaN or infinite."""

PreemptionKind = Literal["swap", "recompute"]
"""Whether a victim's blocks were kept in another tier."""


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


class Absence(Struct, frozen=True, gc=False):
    """A time in which a sequence had no place in a step: after a preemption, or while its prefix came up."""

    start_s: float  # on the machine's monotonic clock
    end_s: float  # its next slice was launched, or it ended
    reason: PreemptionReason | None  # None: it was not preempted, its prefix came up from a lower tier


class FirstToken(Struct, frozen=True, gc=False):
    """A sequence has got its first token; on the machine's monotonic clock."""

    seq: SeqId
    started_s: float  # its first slice was launched


class Finished(Struct, frozen=True, kw_only=True):
    """The end of one sequence; `stop_token` is in the outputs but not in the text."""

    seq: SeqId
    reason: FinishReason
    num_prompt: int  # tokens
    num_outputs: int  # tokens
    num_cached: int  # prompt tokens that were prefix hits when first admitted
    num_cached_ddr: int = 0  # of them: restored from DDR
    num_cached_ssd: int = 0  # of them: read from SSD
    preemptions: int = 0
    swapped_tokens: int = 0  # that came back from a lower tier after a preemption
    recomputed_tokens: int = 0  # that were computed once more after a preemption
    absences: tuple[Absence, ...] = ()  # the first MOST_ABSENCES of them
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
    nano_batch_ms: tuple[float, ...] = ()  # measured, one a nano-batch; 0: all its sequences had gone


class TenantBlocks(Struct, frozen=True, gc=False):
    """What one tenant has in one tier."""

    tenant: TenantId
    used: int  # in tables; a block of several of its tables counts once
    cached: int  # valid copies that may be evicted


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
    daily_blocks: int = 0  # that may be written in a day; 0 = no limit
    writable_blocks: int = 0  # of them: left now
    tenants: tuple[TenantBlocks, ...] = ()  # the largest ones, largest first


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


class PreemptionCount(Struct, frozen=True, array_like=True, gc=False):
    """How often sequences of a tenant gave way, for one reason and in one mode."""

    reason: PreemptionReason
    mode: PreemptionKind
    count: int


class SwitchGauges(Struct, frozen=True, array_like=True, gc=False):
    """Victims that have come back in one mode, and what that took, since start."""

    mode: PreemptionKind
    count: int
    predicted_s: float  # when they were preempted
    realised_s: float  # copies of their blocks and steps that computed their tokens once more


class TenantGauges(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One tenant in the eyes of the scheduler."""

    tenant: TenantId
    service_s: float = 0.0  # device time charged to it, since start
    starving_s: float = 0.0  # how long its oldest waiting sequence has waited
    preemptions: tuple[PreemptionCount, ...] = ()  # since start


class FairGauges(Struct, frozen=True, kw_only=True):
    """How fair it was among tenants of a band that compete: that have had work waiting together till now.

    The while is as long as two of them did, 5 s at least and a minute at most.
    """

    competing: int = 0  # so many tenants, in all bands
    jain: float | None = None  # over service by weight, of the worst band; None: nobody competes
    gap_s: float | None = None  # largest difference of service by weight in a band; None as above
    tenants: tuple[TenantGauges, ...] = ()


class DiskState(enum.Enum):
    """How the SSD tier does."""

    NONE = "none"  # not asked for
    ON = "on"
    READ_ONLY = "read_only"  # writes failed, or the day's bytes are spent for good
    OFF = "off"  # too many calls hang or fail


class SequenceState(enum.Enum):
    """WAITING -> (RESTORING) -> RUNNING -> DONE, with RUNNING -> DRAINING -> PREEMPTED -> RUNNING on the way."""

    WAITING = "waiting"  # never admitted; holds no blocks
    RESTORING = "restoring"  # admitted; its blocks are on their way up, nothing is computed yet
    RUNNING = "running"  # admitted; holds blocks
    DRAINING = "draining"  # preempted; its last launched step has not committed
    PREEMPTED = "preempted"  # waits again, with what it has said so far
    DONE = "done"


class SequenceGauges(Struct, frozen=True, gc=False):
    """One sequence that was admitted, in the eyes of the engine."""

    seq: SeqId
    state: SequenceState
    computed: int  # tokens
    preemptions: int


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
    nano_batches: int = 0  # committed since start
    out_of_memory: int = 0  # steps that the device had no memory for, since start
    tiers: tuple[TierGauges, ...] = ()
    routes: tuple[RouteGauges, ...] = ()
    disk_state: DiskState = DiskState.NONE
    preemptions_by_reason: dict[PreemptionReason, int] = {}
    switches: tuple[SwitchGauges, ...] = ()  # one a mode
    sequences: tuple[SequenceGauges, ...] = ()  # the first in rank of those that were admitted; told with the tiers
    fair: FairGauges | None = None  # told now and then

    def after(self, before: "Gauges") -> "Gauges":
        """Whole again: what this report leaves out is as it was told before."""
        told, fair = self if self.tiers else before, self.fair or before.fair
        return replace(self, tiers=told.tiers, routes=told.routes, sequences=told.sequences, fair=fair)
