"""Answers of /v1/responses: the response, its output items and their parts."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from tiercel.server.api.replies.chat import ChatToken
from tiercel.server.api.replies.usage import UsageBody

Json = dict[str, Any]  # Any: a JSON document
"""An object of JSON. Named here, because `object` is a field below."""
ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(Struct, frozen=True, tag="output_text"):
    """Text of the assistant."""

    text: str
    logprobs: list[ChatToken] = []
    annotations: list[str] = []  # none are made


class OutputRefusal(Struct, frozen=True, tag="refusal"):
    """A refusal, which only clients write: in the messages of an earlier conversation."""

    refusal: str


class ReasoningText(Struct, frozen=True, tag="reasoning_text"):
    """Thoughts of the model."""

    text: str


class OutputMessage(Struct, frozen=True, tag="message"):
    """A message of the assistant."""

    id: str
    content: list[OutputText | OutputRefusal]
    status: ItemStatus
    role: Literal["assistant"] = "assistant"


class ReasoningItem(Struct, frozen=True, tag="reasoning"):
    """The thoughts before an answer. There is no summary: the model's own words are in `content`."""

    id: str
    content: list[ReasoningText]
    status: ItemStatus
    summary: list[str] = []
    encrypted_content: None = None


class FunctionCall(Struct, frozen=True, tag="function_call"):
    """A call of one of the client's functions."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


OutputItem = OutputMessage | ReasoningItem | FunctionCall


class InputTokensDetails(Struct, frozen=True):
    """The part of the prompt tokens that was cached. Nothing is charged for writing the cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct, frozen=True):
    """The part of the output tokens that was spent on thoughts: not counted."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct, frozen=True):
    """The token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


def response_usage(usage: UsageBody) -> ResponseUsage:
    """Return token counts in the shape of the responses API."""
    cached = usage.cached_tokens
    return ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(cached),
        usage.completion_tokens,
        OutputTokensDetails(),
        usage.total_tokens,
    )


class ResponseFault(Struct, frozen=True):
    """The reason for status `failed`."""

    code: str
    message: str


class IncompleteDetails(Struct, frozen=True):
    """The reason for status `incomplete`: `max_output_tokens`, or `timeout`, which is ours."""

    reason: str


class ReasoningBody(Struct, frozen=True):
    """The settings of the thoughts."""

    effort: str | None = None
    summary: str | None = None


class ConversationRef(Struct, frozen=True):
    """The conversation that a response belongs to."""

    id: str


class ResponseBody(Struct, frozen=True, kw_only=True):
    """A response. Fields that the client did not send have the value that was in force."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    background: bool
    conversation: ConversationRef | UnsetType = UNSET  # left out without one
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningBody
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: Json
    tool_choice: str | Json
    tools: list[Json]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled", "auto"]
    usage: ResponseUsage | UnsetType = UNSET  # counted at the end
    user: str | UnsetType = UNSET


class DeletedResponse(Struct, frozen=True):
    """The answer to a deletion."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputItemList(Struct, frozen=True):
    """A page of the input items of a response."""

    data: list[Json]
    first_id: str
    last_id: str
    has_more: bool
    object: Literal["list"] = "list"


class InputTokenCount(Struct, frozen=True):
    """The number of tokens that a request would send to the model."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"
