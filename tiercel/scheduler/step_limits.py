"""The limits on one step."""

from dataclasses import dataclass

from tiercel.scheduler.chunk import chunk_length

YIELD_LOSS = 0.03
"""The largest part of the prompts' throughput that is given up so that a step ends sooner."""

DEFAULT_GOAL_S = 0.2
"""The goal between two tokens if the operator sets none, unless decodes alone take more than half of it."""

DECODE_STEPS = 2.0
"""The default goal is at least this many steps of the decodes alone, so that prompts get at least half of a step."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The maximum contents of one step."""

    max_num_seqs: int
    max_num_batched_tokens: int  # >= max_num_seqs, so that all decodes and one token of a prompt fit
    long_prefill_token_threshold: int = 0  # maximum tokens of one prompt per step; 0 = no limit
    max_long_partial_prefills: int = 0  # maximum long prompts under way at once; 0 = no limit
    long_prompt_tokens: int = 2048  # a prompt with at least this many tokens left is long
    tbt_goal_ms: float = 0.0  # goal between two tokens, for tenants without a goal of their own; 0 = none
    # The goal is not the operator's: it rises to `DECODE_STEPS` times a step of the decodes alone.
    is_goal_elastic: bool = False
    min_prefill_share: float = 0.0  # part of the device time that prompts get beside decodes, whatever the goal
    yield_ms: float = 0.0  # time after which a step without decodes should end; 0 = no limit
    block_bytes: int = 0  # bytes of KV per block

    def chunk_tokens(self, start: int, want: int, budget: int, block_size: int) -> int:
        """Return the tokens of the next slice of a prompt."""
        threshold = self.long_prefill_token_threshold or want
        return chunk_length(start, want, min(budget, threshold), block_size)
