"""The body of /v1/completions."""

from typing import Annotated

from pydantic import Field, SkipValidation

from tiercel.server.api.schemas.fields import Flag, Integer
from tiercel.server.api.schemas.sampling import MAX_CHOICES, SamplingFields

_DEFAULT_TOKENS = 16  # as of OpenAI

Prompt = str | list[str] | list[int] | list[list[int]] | None


class CompletionFields(SamplingFields):
    """The body of /v1/completions."""

    prompt: SkipValidation[Prompt] = None  # checked by `split_prompts`: lists of tokens can be long
    logprobs: Annotated[Integer, Field(ge=-1)] | None = None  # -1: the whole vocabulary
    echo: Flag | None = None
    best_of: Annotated[Integer, Field(ge=1, le=MAX_CHOICES)] | None = None
    suffix: str | None = None
    add_special_tokens: Flag = True

    @property
    def num_outputs(self) -> int:
        """The maximum number of output tokens."""
        return _DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_choices(self) -> int:
        """The number of choices that are computed of each prompt: with `best_of` more than are returned."""
        return max(self.n or 1, self.best_of or 1)
