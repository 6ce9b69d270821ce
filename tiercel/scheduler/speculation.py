"""Speculation: which requests may have proposed tokens, and how many of them were right."""

from tiercel.values.request import SamplingParams


def may_speculate(params: SamplingParams) -> bool:
    """Return whether proposed tokens can be checked in one step: no draw depends on tokens that it may reject."""
    return (
        params.prompt_lookup_num_tokens > 0
        and params.repetition_penalty == 1.0
        and not params.presence_penalty
        and not params.frequency_penalty
        and not params.grammar
        and not params.bad_words
        and params.max_tokens > 0
        and params.logprobs is None
    )


class SpeculationCounts:
    """The proposed tokens of all committed steps, since the start."""

    __slots__ = ("accepted", "drafts", "proposed")

    def __init__(self) -> None:
        self.drafts = 0  # slices with proposed tokens
        self.proposed = 0
        self.accepted = 0

    def add(self, proposed: int, accepted: int) -> None:
        """Count one slice."""
        self.drafts += 1
        self.proposed += proposed
        self.accepted += accepted


def accepted_tokens(
    proposed: tuple[int, ...], sampled: tuple[int, ...], stop_tokens: frozenset[int]
) -> tuple[int, ...]:
    """Return the sampled tokens that count: up to the first that was not proposed or ends the sequence."""
    for number, (guess, token) in enumerate(zip(proposed, sampled, strict=False)):
        if guess != token or token in stop_tokens:
            return sampled[: number + 1]
    return sampled
