"""The fields that chat and text completions share."""

from typing import Annotated

from pydantic import Field

from tiercel.server.api.schemas.fields import (
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    Fields,
    Finite,
    Flag,
    Integer,
    Word,
)

INT64_MIN = -(2**63)
INT64_MAX = 2**63 - 1
MAX_STOP_LETTERS = 256
MAX_CHOICES = 8
MAX_TIMEOUT_S = 86_400

StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LETTERS)]

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


class SamplingFields(Fields):
    """The fields that chat and text completions share."""

    model: str | None = None
    n: Annotated[Integer, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[Finite, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Integer, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Finite, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Finite], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    seed: Annotated[Integer, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None
    max_tokens: Integer | None = None
    min_tokens: Annotated[Integer, Field(ge=0)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[Integer], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: Flag | None = None
    include_stop_str_in_output: Flag | None = None
    skip_special_tokens: Flag | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Word | None = None
    priority: Annotated[Integer, Field(ge=-(2**31), le=2**31 - 1)] | None = None  # a lower number goes first
    timeout: Timeout | None = None
    user: str | None = None  # ignored: the key decides whose request it is
