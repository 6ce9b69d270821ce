"""Calls of functions in answers of the chat API."""

import secrets
import string
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from tiercel.server.text.answer.event import CallArguments, CallStart, ParsedCall
from tiercel.server.text.answer.formats import CallFormat

_LETTERS = string.ascii_letters + string.digits


class ToolCallFunction(Struct, frozen=True):
    """The function of a call."""

    name: str
    arguments: str  # a JSON object


class ToolCall(Struct, frozen=True):
    """A call in a whole answer."""

    id: str
    function: ToolCallFunction
    type: Literal["function"] = "function"


class ToolCallFunctionDelta(Struct, frozen=True):
    """The name of a function, or the next piece of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(Struct, frozen=True):
    """The new part of a call. The first one has the id and the name."""

    index: int
    function: ToolCallFunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


def new_call_id(form: CallFormat | None) -> str:
    """Return an id for a call that templates of its format accept."""
    if form is not None and form.id_letters:
        return "".join(secrets.choice(_LETTERS) for _ in range(form.id_letters))
    return f"call_{secrets.token_hex(12)}"


def tool_call(call: ParsedCall, form: CallFormat | None) -> ToolCall:
    """Return a complete call as clients get it."""
    return ToolCall(new_call_id(form), ToolCallFunction(call.name, call.arguments))


def call_delta(event: CallStart | CallArguments, form: CallFormat | None) -> ToolCallDelta:
    """Return the new part of a call as clients get it."""
    if isinstance(event, CallArguments):
        return ToolCallDelta(event.index, ToolCallFunctionDelta(arguments=event.text))
    return ToolCallDelta(event.index, ToolCallFunctionDelta(event.name, ""), new_call_id(form), "function")
