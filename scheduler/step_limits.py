"""The limits on one step."""

from dataclasses import dataclass

YIELD_LOSS = 0.03
"""The largest part of the prompts' throughput that is given up so that a step ends sooner."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What one step may hold."""

    max_num_seqs: int
    max_num_batched_tokens: int  # at least max_num_seqs, so that every decode fits beside a prefill's first token
    long_prefill_token_threshold: int = 0  # tokens of one prompt a step; 0 = no cap
    max_long_partial_prefills: int = 0  # long prompts under way at once; 0 = no cap
    long_prompt_tokens: int = 2048  # from here on a prompt is long
    tbt_goal_ms: float = 0.0  # between two tokens of those that decode, where the tenant has no goal; 0 = none
    yield_ms: float = 0.0  # after which a step without decodes is to end; 0: it holds as many tokens as it may
    block_bytes: int = 0  # of KV
