"""The token counts of an answer."""

from msgspec import UNSET, Struct, UnsetType

from tiercel.server.client.generation import TokenUsage


class PromptTokensDetails(Struct, frozen=True):
    """The part of the prompt tokens that was cached."""

    cached_tokens: int


class UsageBody(Struct, frozen=True):
    """The token counts of an answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET  # left out unless the server counts them

    @property
    def cached_tokens(self) -> int:
        """The prompt tokens that were cached; 0 if they are not counted."""
        return 0 if isinstance(self.prompt_tokens_details, UnsetType) else self.prompt_tokens_details.cached_tokens


def usage_body(usage: TokenUsage, *, with_details: bool) -> UsageBody:
    """Return the token counts as clients get them."""
    details = PromptTokensDetails(usage.cached_tokens) if with_details else UNSET
    total = usage.prompt_tokens + usage.completion_tokens
    return UsageBody(usage.prompt_tokens, usage.completion_tokens, total, details)
