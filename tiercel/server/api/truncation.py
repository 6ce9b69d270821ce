"""The truncation of prompts that a request asks for, within the limits of the model."""

from tiercel.server.api.params import ModelLimits
from tiercel.server.api.schemas.truncation import TruncationFields
from tiercel.server.text.tokenizer import Truncation
from tiercel.values.errors import AdmissionError


def truncation_of(fields: TruncationFields, limits: ModelLimits, max_tokens: int | None) -> Truncation | None:
    """Return the truncation of each prompt; `max_tokens` outputs need room behind it, None: at least one.

    Errors: AdmissionError (400) for more tokens than a prompt may have.
    """
    count = fields.truncate_prompt_tokens
    if count is None:
        return None
    side = fields.truncation_side or "left"
    longest = limits.longest - max(max_tokens or 0, 0)
    if count == -1:
        room = longest - (max_tokens is None)
        return Truncation(max(room if limits.quota_tokens is None else min(room, limits.quota_tokens), 1), side)
    if longest >= 1 and count > longest:  # outputs that leave no room are refused with their own field
        shown = count if count < 10**12 else "..."
        raise AdmissionError(
            400,
            f"truncate_prompt_tokens={shown} cannot be greater than max_model_len - max_tokens = {longest}."
            " Please request a smaller truncation size.",
            param="truncate_prompt_tokens",
        )
    return Truncation(count, side)


def truncated(prompts: list[list[int]], truncation: Truncation | None) -> list[list[int]]:
    """Return prompts that were given as token ids, truncated."""
    if truncation is None:
        return prompts
    return [truncation.kept(tokens, truncation.tokens) for tokens in prompts]
