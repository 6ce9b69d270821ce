"""The fields that chat and text completions share."""

from typing import Annotated, Literal

from pydantic import Field

from tiercel.server.api.schemas.fields import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    Fields,
    Finite,
    Flag,
    Integer,
    Metadata,
    Word,
)
from tiercel.server.api.schemas.structured import StructuredFields
from tiercel.server.api.schemas.truncation import INT64_MAX, TruncationFields
from tiercel.values.request import MAX_LOOKUP_TOKENS

INT64_MIN = -(2**63)
MAX_STOP_LETTERS = 256
MAX_CHOICES = 128
MAX_WORD_LETTERS = 256
MAX_TIMEOUT_S = 86_400

StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LETTERS)]

BadWord = Annotated[str, Field(min_length=1, max_length=MAX_WORD_LETTERS)]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority"]

Timeout = Annotated[
    float,
    Field(
        strict=True,
        gt=0,
        le=MAX_TIMEOUT_S,
        allow_inf_nan=False,
        description="Seconds from the arrival of the request to the end of its answer, which may then be incomplete.",
    ),
]


class StreamOptions(Fields):
    """The options of a stream."""

    include_usage: Flag | None = None
    continuous_usage_stats: Flag | None = None


class SamplingFields(StructuredFields, TruncationFields):
    """The fields that chat and text completions share."""

    model: str | None = None
    n: Annotated[Integer, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[Finite, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Finite, Field(ge=0, le=1)] | None = None  # 0 takes the likeliest token
    top_k: Annotated[Integer, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Finite, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Finite], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    seed: Annotated[Integer, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None
    max_tokens: Annotated[Integer, Field(json_schema_extra={"minimum": 0})] | None = None  # checked by `params`
    min_tokens: Annotated[Integer, Field(ge=0)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[Integer], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    allowed_token_ids: Annotated[list[Integer], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    ignore_eos: Flag | None = None
    include_stop_str_in_output: Flag | None = None
    skip_special_tokens: Flag | None = None
    prompt_logprobs: Annotated[Integer, Field(ge=-1)] | None = None  # -1: the whole vocabulary
    return_token_ids: Flag | None = None
    return_tokens_as_token_ids: Flag | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Word | None = None
    priority: Annotated[Integer, Field(ge=-(2**31), le=2**31 - 1)] | None = None  # a lower number goes first
    service_tier: ServiceTier | None = None
    timeout: Timeout | None = None
    prompt_lookup_num_tokens: Annotated[Integer, Field(ge=0, le=MAX_LOOKUP_TOKENS)] | None = None
    metadata: Metadata | None = None  # ignored, but by chat completions that are stored
    user: str | None = None  # ignored: the key decides whose request it is

    @property
    def num_choices(self) -> int:
        """The number of choices that are computed of each prompt."""
        return self.n or 1
