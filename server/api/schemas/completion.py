"""The body of /v1/completions."""

from typing import Annotated

from pydantic import Field, SkipValidation

from tiercel.server.api.schemas.fields import Flag, Integer
from tiercel.server.api.schemas.sampling import SamplingFields

Prompt = str | list[str] | list[int] | list[list[int]] | None


class CompletionFields(SamplingFields):
    """The body of /v1/completions."""

    prompt: SkipValidation[Prompt] = None  # checked by `split_prompts`: lists of tokens can be long
    logprobs: Annotated[Integer, Field(ge=0)] | None = None
    add_special_tokens: Flag = True
