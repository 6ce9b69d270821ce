"""The token counts of an answer."""

from msgspec import Struct

from tiercel.server.engine.generation import TokenUsage


class PromptTokensDetails(Struct, frozen=True):
    """The part of the prompt tokens that was cached."""

    cached_tokens: int


class UsageBody(Struct, frozen=True):
    """The token counts of an answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


def usage_body(usage: TokenUsage, *, with_details: bool) -> UsageBody:
    """Return the token counts as clients get them."""
    details = PromptTokensDetails(usage.cached_tokens) if with_details else None
    total = usage.prompt_tokens + usage.completion_tokens
    return UsageBody(usage.prompt_tokens, usage.completion_tokens, total, details)
