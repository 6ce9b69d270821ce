"""The fields that all chunks and bodies of one answer share."""

from collections.abc import Callable

from msgspec import Struct


def _no_fingerprint() -> None:
    return None


class ReplyHead(Struct, frozen=True, kw_only=True):
    """The fields that are the same in every chunk and body of one client request."""

    id: str
    created: int
    model: str
    with_logprobs: bool
    with_details: bool
    role: str
    service_tier: str | None = None  # that served the request, if the client named one
    with_tokens: bool = False  # the ids of prompt and output tokens are returned
    with_prompt_logprobs: bool = False
    read_fingerprint: Callable[[], str | None] = _no_fingerprint  # known when the engine is ready
    names_token_ids: bool = False  # tokens of log-probabilities are written "token_id:123"

    @property
    def system_fingerprint(self) -> str | None:
        """A text that changes with the weights, the types of their numbers and the kernels."""
        return self.read_fingerprint()

    def token_name(self, token: int, text: str) -> str:
        """Return how a token is written in log-probabilities."""
        return f"token_id:{token}" if self.names_token_ids else text
