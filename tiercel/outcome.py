"""Facts: what a step brought, and how a request ended."""

import enum

from msgspec import Struct

from tiercel.ids import SeqId


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
