"""Facts: the results of a step, the ends of requests, and the gauges of the engine."""

import enum
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from tiercel.values.ids import SeqId, TenantId
from tiercel.values.plan import PreemptionReason
from tiercel.values.tier import Route, Tier

MAX_ABSENCES = 32
"""The maximum number of absences that `Finished` lists."""

BAD_LOGITS = "the model's logits are not finite"
"""`Finished.error` of a sequence whose logits were NaN or infinite."""

PreemptionKind = Literal["swap", "recompute"]
"""How a sequence was preempted: its blocks were kept in a lower tier, or those without a copy were dropped."""


class FinishReason(enum.Enum):
    """The outcome of a sequence. Every accepted request has exactly one."""

    STOP = "stop"  # an end-of-sequence or stop token, or a stop string that the HTTP process found
    LENGTH = "length"  # max_tokens or the model's context
    TIMEOUT = "timeout"  # a time limit of the request passed
    ABORT = "abort"  # the client disconnected
    ERROR = "error"  # the engine failed this request; `Finished.error` says how


class TokenLogprobs(Struct, frozen=True, gc=False):
    """Natural log-probabilities at one position, before temperature, penalties and filters."""

    seq: SeqId
    token: int
    logprob: float  # of the sampled token
    rank: int  # of the sampled token, from 1
    top_tokens: tuple[int, ...]  # the likeliest first
    top_logprobs: tuple[float, ...]


class PromptReading(Struct, frozen=True, kw_only=True, gc=False):
    """The values that a step has read from the final states of prompt positions [start, end) of one sequence.

    The state of position p predicts the token at p + 1: for log-probabilities, the i-th entry concerns the prompt
    token at start + i + 1. All arrays are raw: float32, and uint32 for ranks and tokens.

    Shapes: logprobs, ranks [end - start]; top_tokens, top_logprobs [end - start, num_top], likeliest first;
            state_sum [hidden], the sum of the states, for a request with pooling; arrays that do not apply are empty.
    """

    seq: SeqId
    start: int
    end: int
    num_top: int = 0
    logprobs: bytes = b""
    ranks: bytes = b""  # from 1
    top_tokens: bytes = b""
    top_logprobs: bytes = b""
    state_sum: bytes = b""

    @property
    def num_bytes(self) -> int:
        """The bytes of the arrays."""
        arrays = (self.logprobs, self.ranks, self.top_tokens, self.top_logprobs, self.state_sum)
        return sum(map(len, arrays))

    def cut(self, start: int, end: int) -> "PromptReading":
        """Return the log-probabilities of positions [start, end), which lie inside this part."""
        first, last = 4 * (start - self.start), 4 * (end - self.start)
        return PromptReading(
            seq=self.seq,
            start=start,
            end=end,
            num_top=self.num_top,
            logprobs=self.logprobs[first:last],
            ranks=self.ranks[first:last],
            top_tokens=self.top_tokens[first * self.num_top : last * self.num_top],
            top_logprobs=self.top_logprobs[first * self.num_top : last * self.num_top],
        )


class Pooled(Struct, frozen=True, gc=False):
    """The answer to a request with pooling. Shapes: vector [hidden], raw float32."""

    seq: SeqId
    vector: bytes


class Absence(Struct, frozen=True, gc=False):
    """A time in which a sequence was in no step: after a preemption, or while its prefix was restored."""

    start_s: float  # on the machine's monotonic clock
    end_s: float  # when its next slice was launched, or the sequence ended
    reason: PreemptionReason | None  # of the preemption; None: the prefix was restored from a lower tier


class FirstToken(Struct, frozen=True, gc=False):
    """The first token of a sequence."""

    seq: SeqId
    started_s: float  # when its first slice was launched, on the machine's monotonic clock
    num_found: int = 0  # of its tokens, prompt and resumed outputs, that the cache had then


class Finished(Struct, frozen=True, kw_only=True):
    """The end of one sequence. `stop_token` is in the outputs but not in the text."""

    seq: SeqId
    reason: FinishReason
    num_prompt: int  # tokens
    num_outputs: int  # tokens
    num_cached: int  # prompt tokens that were prefix hits at the first admission
    num_cached_ddr: int = 0  # part of num_cached: restored from DDR
    num_cached_ssd: int = 0  # part of num_cached: read from SSD
    preemptions: int = 0
    swapped_tokens: int = 0  # restored from a lower tier after a preemption
    recomputed_tokens: int = 0  # computed again after a preemption
    absences: tuple[Absence, ...] = ()  # the first MAX_ABSENCES
    queued_s: float = 0.0  # arrival to first slice launched
    prefill_s: float = 0.0  # first slice launched to first token
    decode_s: float = 0.0  # first token to last token
    stop_token: int | None = None
    error: str | None = None


class StepOutcome(Struct, frozen=True):
    """The result of one launched step.

    `tokens` are those of the sampling slices of the plan, in order; of each slice, `Slice.num_sampled`.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    bad: tuple[int, ...] = ()  # indices into `tokens` of draws whose logits were not finite; only their requests fail
    nano_batch_ms: tuple[float, ...] = ()  # measured, one per nano-batch; 0: all its sequences had ended
    failures: tuple[tuple[int, str], ...] = ()  # draws that no token fits, and why; as for `bad`
    prompts: tuple[PromptReading, ...] = ()  # in the order of the slices


class TenantBlocks(Struct, frozen=True, gc=False):
    """The blocks of one tenant in one tier."""

    tenant: TenantId
    used: int  # in block tables; a block in several tables of the tenant counts once
    cached: int  # valid copies that may be evicted


class TierGauges(Struct, frozen=True, kw_only=True, gc=False):
    """The gauges of one tier. An arena that serves as both device and host tier is reported as HBM only."""

    tier: Tier
    block_bytes: int = 0
    blocks_total: int = 0
    blocks_used: int = 0  # owned by a table or a transfer, or waiting for a deferred free
    blocks_cached: int = 0  # valid copies that may be evicted
    hit_tokens: int = 0  # prompt tokens whose fastest copy was in this tier, since start
    missed_tokens: int = 0  # prompt tokens looked up in this tier and not found, since start
    evictions: int = 0  # blocks, since start
    mean_run_blocks: float = 0.0  # mean number of consecutive slots per allocation, since start
    daily_blocks: int = 0  # limit of blocks written per day; 0 = no limit
    writable_blocks: int = 0  # blocks that may still be written today
    tenants: tuple[TenantBlocks, ...] = ()  # the tenants with the most blocks, in descending order


class RouteGauges(Struct, frozen=True, kw_only=True, gc=False):
    """The counters of one route, since start. Bytes, blocks and copies count landed transfers only."""

    route: Route
    transfers: int = 0
    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0  # spent copying, which overlaps with computing
    copies: int = 0  # after adjacent blocks were merged
    failures: int = 0
    late: int = 0
    misses: int = 0  # reads whose bytes did not match their key


class PreemptionCount(Struct, frozen=True, array_like=True, gc=False):
    """The number of preemptions of a tenant's sequences for one reason and in one mode."""

    reason: PreemptionReason
    mode: PreemptionKind
    count: int


class SwitchGauges(Struct, frozen=True, array_like=True, gc=False):
    """The predicted and measured cost of the preemptions in one mode whose victims have resumed, since start."""

    mode: PreemptionKind
    count: int
    predicted_s: float  # at the time of the preemption
    realised_s: float  # copying blocks, and computing tokens again


class TenantGauges(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The scheduler's gauges of one tenant."""

    tenant: TenantId
    service_s: float = 0.0  # device time charged to the tenant, since start
    starving_s: float = 0.0  # time that its oldest waiting sequence has waited
    preemptions: tuple[PreemptionCount, ...] = ()  # since start


class FairGauges(Struct, frozen=True, kw_only=True):
    """The evenness of service among competing tenants: tenants of one band that all had waiting work.

    The values cover the time for which at least two tenants have competed: at least 5 s, at most a minute.
    """

    competing: int = 0  # number of competing tenants, in all bands
    jain: float | None = None  # Jain's index of service by weight in the worst band; None: no tenants compete
    gap_s: float | None = None  # largest difference of service by weight in a band; None: no tenants compete
    tenants: tuple[TenantGauges, ...] = ()


class DiskState(enum.Enum):
    """The state of the SSD tier."""

    NONE = "none"  # not configured
    ON = "on"
    READ_ONLY = "read_only"  # writes failed, or no more bytes may be written
    OFF = "off"  # too many calls hung or failed


class SequenceState(enum.Enum):
    """The state of a sequence.

    WAITING -> (RESTORING) -> RUNNING -> DONE. A preempted sequence goes RUNNING -> DRAINING -> PREEMPTED and is then
    admitted again.
    """

    WAITING = "waiting"  # never admitted; holds no blocks
    RESTORING = "restoring"  # admitted; its blocks are being restored, and nothing is computed yet
    RUNNING = "running"  # admitted; holds blocks
    DRAINING = "draining"  # preempted; its last launched step has not committed
    PREEMPTED = "preempted"  # waits again; its tokens are kept
    DONE = "done"


class GrammarGauges(Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """The counters of grammars, since start."""

    compiled: int = 0
    failed: int = 0  # compilations
    compile_s: float = 0.0  # on a thread beside the loop
    hits: int = 0  # requests whose grammar was compiled before
    masks: int = 0  # computed, one for each token of a constrained sequence
    mask_s: float = 0.0  # on the lane


class ExpertGauges(Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """The counters of experts that are partly in memory (`--expert-memory`), since start; all 0 without."""

    experts: int = 0  # of all layers
    slots: int = 0  # experts that are in memory at most
    memory_bytes: int = 0  # of these slots
    hits: int = 0  # experts that a layer of a forward needed and that were in memory
    misses: int = 0  # those that were not
    fetched_ahead: int = 0  # asked for by a prediction
    fetched_bytes: int = 0
    evictions: int = 0
    stalls: int = 0  # times that computing waited for an expert
    stall_s: float = 0.0
    off: int = 0  # 1: no folder could be used, and all experts are in memory


class SequenceGauges(Struct, frozen=True, gc=False):
    """The engine's gauges of one sequence that was admitted."""

    seq: SeqId
    state: SequenceState
    computed: int  # tokens
    preemptions: int


class Gauges(Struct, frozen=True, kw_only=True, gc=False):
    """The engine's gauges at the end of a step."""

    num_running: int = 0
    num_waiting: int = 0  # sequences that were never admitted or are preempted
    num_preempted: int = 0  # the preempted sequences among them
    blocks_total: int = 0
    blocks_used: int = 0  # referenced by a sequence, or waiting for a deferred free; cached blocks do not count
    blocks_cached: int = 0  # evictable prefix-cache blocks
    step_tokens: int = 0  # prompt tokens computed and tokens sampled by the step; 0: no step to observe
    prefix_queries: int = 0  # prompt tokens looked up, since start
    prefix_hits: int = 0  # prompt tokens found, since start
    preemptions: int = 0  # since start
    steps: int = 0  # committed since start
    preemptions_swap: int = 0  # preemptions that kept the blocks in a lower tier
    preemptions_recompute: int = 0  # preemptions that dropped the blocks
    swapped_tokens: int = 0  # restored from a lower tier after a preemption, since start
    recomputed_tokens: int = 0  # computed again after a preemption, since start
    nano_batches: int = 0  # committed since start
    out_of_memory: int = 0  # steps that failed for lack of device memory, since start
    drafts: int = 0  # slices with proposed tokens, since start
    proposed_tokens: int = 0  # since start
    accepted_tokens: int = 0  # proposed tokens that were drawn, since start
    threads: int = 0  # that compute together at present; 0: the device is no CPU
    tiers: tuple[TierGauges, ...] = ()
    routes: tuple[RouteGauges, ...] = ()
    disk_state: DiskState = DiskState.NONE
    preemptions_by_reason: dict[PreemptionReason, int] = {}
    switches: tuple[SwitchGauges, ...] = ()  # one per mode
    sequences: tuple[SequenceGauges, ...] = ()  # admitted sequences of the highest ranks; reported with the tiers
    fair: FairGauges | None = None  # in some reports only
    grammars: GrammarGauges = GrammarGauges()
    experts: ExpertGauges = ExpertGauges()

    def after(self, before: "Gauges") -> "Gauges":
        """Return the gauges with the parts that this report leaves out taken from an earlier report."""
        full, fair = self if self.tiers else before, self.fair or before.fair
        return replace(self, tiers=full.tiers, routes=full.routes, sequences=full.sequences, fair=fair)
