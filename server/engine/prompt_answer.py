"""The part of an answer that repeats the prompt: its text, its tokens and their log-probabilities."""

from array import array
from collections.abc import Callable, Sequence

from msgspec import Struct

from tiercel.server.engine.logprobs import DrawnToken, DrawnTokens


class PromptAnswer(Struct, frozen=True):
    """The prompt of one choice, as far as the client asked for it.

    The engine fills `logprobs` before the first token of the choice, or before its end if it has none: the entries of
    all tokens but the first. Of several choices of a whole answer, the first has computed them for all.
    """

    tokens: Sequence[int]
    text: str | None  # None: it is not repeated
    logprobs: DrawnTokens  # empty if the client did not ask for them
    read_pooled: "Callable[[], array[float]]"  # its pooled states, once they are computed, if they were asked for

    @property
    def first(self) -> DrawnToken:
        """The first token, which nothing predicts: of rank 0, without a log-probability."""
        return DrawnToken(self.logprobs.choice(self.tokens[0], 0.0), (), rank=0)
