"""`prompt_logprobs` in the shape of vLLM, which both generation routes share."""

from collections.abc import Iterator

from msgspec import Struct

from tiercel.server.api.replies.hole import list_pieces
from tiercel.server.client.logprobs import DrawnToken, TokenChoice
from tiercel.server.client.prompt_answer import PromptAnswer


class PromptLogprob(Struct, frozen=True):
    """The log-probability of one token at a position of a prompt."""

    logprob: float
    rank: int  # from 1
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt the log-probabilities at its position, by token id; null for the first token."""


def prompt_logprobs_pieces(prompt: PromptAnswer) -> Iterator[bytes]:
    """Yield the JSON of `PromptLogprobs`, piece by piece."""
    return list_pieces(_positions(prompt), lambda entry: None if entry is None else _by_token(entry))


def _positions(prompt: PromptAnswer) -> Iterator[DrawnToken | None]:
    yield None
    yield from prompt.logprobs


def _by_token(entry: DrawnToken) -> dict[str, PromptLogprob]:
    """Return the prompt's own token first, then the likeliest ones."""
    by_token = {str(entry.drawn.token): _logprob(entry.drawn, entry.rank)}
    for rank, choice in enumerate(entry.likeliest, 1):
        by_token.setdefault(str(choice.token), _logprob(choice, rank))
    return by_token


def _logprob(choice: TokenChoice, rank: int) -> PromptLogprob:
    return PromptLogprob(choice.logprob, rank, choice.text)
