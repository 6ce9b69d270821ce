"""The events of a streamed response. Each carries its type, which is also the name of the event, and its number."""

from msgspec import Struct

from tiercel.server.api.replies.chat import ChatToken
from tiercel.server.api.replies.responses import (
    OutputItem,
    OutputRefusal,
    OutputText,
    ReasoningText,
    ResponseBody,
)
from tiercel.server.http.failure import Fault


class _Event(Struct, frozen=True, kw_only=True, tag_field="type"):
    sequence_number: int


class ResponseCreated(_Event, frozen=True, kw_only=True, tag="response.created"):
    """The first event."""

    response: ResponseBody


class ResponseQueued(_Event, frozen=True, kw_only=True, tag="response.queued"):
    """A response in the background waits for the engine."""

    response: ResponseBody


class ResponseInProgress(_Event, frozen=True, kw_only=True, tag="response.in_progress"):
    """The engine works on the response."""

    response: ResponseBody


class ResponseCompleted(_Event, frozen=True, kw_only=True, tag="response.completed"):
    """The last event of a response that ended by itself."""

    response: ResponseBody


class ResponseIncomplete(_Event, frozen=True, kw_only=True, tag="response.incomplete"):
    """The last event of a response that a limit ended."""

    response: ResponseBody


class ResponseFailed(_Event, frozen=True, kw_only=True, tag="response.failed"):
    """The last event of a response that failed."""

    response: ResponseBody


class ResponseErrorEvent(_Event, frozen=True, kw_only=True, tag="error"):
    """The error behind a failed response, with the fields of the specification and, for clients that look there,
    with `error`."""

    code: str | None
    message: str
    param: str | None
    error: Fault


class _ItemEvent(_Event, frozen=True, kw_only=True):
    output_index: int


class OutputItemAdded(_ItemEvent, frozen=True, kw_only=True, tag="response.output_item.added"):
    """An item begins."""

    item: OutputItem


class OutputItemDone(_ItemEvent, frozen=True, kw_only=True, tag="response.output_item.done"):
    """An item is complete."""

    item: OutputItem


class _PartEvent(_ItemEvent, frozen=True, kw_only=True):
    item_id: str
    content_index: int


class ContentPartAdded(_PartEvent, frozen=True, kw_only=True, tag="response.content_part.added"):
    """A part of an item begins."""

    part: OutputText | OutputRefusal | ReasoningText


class ContentPartDone(_PartEvent, frozen=True, kw_only=True, tag="response.content_part.done"):
    """A part of an item is complete."""

    part: OutputText | OutputRefusal | ReasoningText


class OutputTextDelta(_PartEvent, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """New text. Its log-probabilities are in this event only."""

    delta: str
    logprobs: list[ChatToken] = []


class OutputTextDone(_PartEvent, frozen=True, kw_only=True, tag="response.output_text.done"):
    """A text is complete."""

    text: str
    logprobs: list[ChatToken] = []


class ReasoningTextDelta(_PartEvent, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    """New thoughts."""

    delta: str


class ReasoningTextDone(_PartEvent, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    """The thoughts are complete."""

    text: str


class _CallEvent(_ItemEvent, frozen=True, kw_only=True):
    item_id: str


class ArgumentsDelta(_CallEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"):
    """New text of the arguments of a call."""

    delta: str


class ArgumentsDone(_CallEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    """The arguments of a call are complete."""

    name: str
    arguments: str


ResponseEvent = (
    ResponseCreated
    | ResponseQueued
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | ResponseErrorEvent
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | ArgumentsDelta
    | ArgumentsDone
)


def event_name(event: Struct) -> str:
    """Return the type of an event, which is its name in the stream."""
    name = event.__struct_config__.tag
    assert isinstance(name, str)
    return name
