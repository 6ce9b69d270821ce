"""The messages and tools of a request, checked and in the shape that chat templates get."""

import json
import re
from collections.abc import Sequence
from typing import cast

import msgspec

from tiercel.server.api.schemas.chat import MessageFields, message_text
from tiercel.server.api.schemas.tools import (
    MAX_ARGUMENTS_LETTERS,
    MAX_TOOLS_LETTERS,
    CalledFunctionFields,
    CallFields,
    ToolFields,
)
from tiercel.server.text.answer.json_value import MAX_DEPTH, ValueScanner
from tiercel.server.text.template_frames import ChatMessage
from tiercel.values.errors import AdmissionError

_RESULT_ROLES = ("tool", "function")


def read_messages(messages: Sequence[MessageFields]) -> list[ChatMessage]:
    """Return messages as a template gets them.

    `function_call` and the role "function", which OpenAI replaced by tools, become a call and its result.
    Errors: AdmissionError (400), also if the result of a tool belongs to no call.
    """
    known: set[str] = set()
    read: list[ChatMessage] = []
    for index, message in enumerate(messages):
        place = message.place or f"messages.{index}"
        calls = _calls_of(message)
        if message.role == "tool":
            _check_result(place, message.tool_call_id, known)
        known.update(call.id for call in calls)
        is_result = message.role in _RESULT_ROLES
        read.append(
            ChatMessage(
                role="tool" if is_result else message.role,
                content=message_text(message),
                name=message.name,
                tool_calls=_calls_json(place, calls),
                tool_call_id=message.tool_call_id if is_result else None,
                thoughts=message.reasoning_content if message.reasoning_content is not None else message.reasoning,
                place=place,
                sent_role=message.role,
            )
        )
    return read


def tools_json(tools: Sequence[ToolFields]) -> str:
    """Return tools as a template gets them: a JSON list, "" for none. Errors: AdmissionError (400)."""
    if not tools:
        return ""
    entries: list[object] = []
    for tool in tools:
        function: dict[str, object] = {"name": tool.function.name}
        if tool.function.description is not None:
            function["description"] = tool.function.description
        if tool.function.parameters is not None:
            function["parameters"] = tool.function.parameters
        entries.append({"type": "function", "function": function})
    text = _json(entries, "tools")
    if len(text) > MAX_TOOLS_LETTERS:
        raise AdmissionError(
            400, f"tools: {len(text)} characters of JSON; at most {MAX_TOOLS_LETTERS} are allowed", param="tools"
        )
    return text


def _calls_of(message: MessageFields) -> Sequence[CallFields]:
    if message.role != "assistant":
        if message.tool_calls or message.function_call is not None:
            raise _refusal(f"messages: tool_calls are for messages of the assistant, not of the {message.role}")
        return ()
    if message.function_call is not None:
        return [CallFields(function=message.function_call)]
    return message.tool_calls or ()


def _check_result(place: str, call: str | None, known: set[str]) -> None:
    if call is None:
        raise _refusal(f"{place}: a message of the role tool needs tool_call_id")
    if call not in known:
        raise _refusal(f"{place}: tool_call_id is that of no call in an earlier message of the assistant")


def _calls_json(place: str, calls: Sequence[CallFields]) -> str:
    if not calls:
        return ""
    entries = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.function.name, "arguments": _arguments(place, call.function)},
        }
        for call in calls
    ]
    return _json(entries, "messages")


def _arguments(place: str, function: CalledFunctionFields) -> object:
    """Return the arguments of a call as an object, as templates expect; text that is no JSON object stays text."""
    value = function.arguments
    if isinstance(value, dict):
        return cast(dict[str, object], value)
    if not isinstance(value, str):
        raise _refusal(f"{place}: the arguments of a call must be a JSON object or its text")
    if len(value) > MAX_ARGUMENTS_LETTERS:
        raise _refusal(f"{place}: {len(value)} characters of arguments; at most {MAX_ARGUMENTS_LETTERS} are allowed")
    try:
        decoded: object = msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return value
    if not isinstance(decoded, dict):
        return value
    scanner = ValueScanner()
    scanner.scan(value.lstrip(), 0)
    if scanner.is_bad:
        raise _refusal(f"{place}: the arguments of a call nest deeper than {MAX_DEPTH} levels")
    return cast(dict[str, object], decoded)


def _json(value: object, field: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except ValueError as exc:  # a number of thousands of digits
        raise AdmissionError(400, f"{field}: a number has too many digits", param=field) from exc


def _refusal(text: str) -> AdmissionError:
    """Return the refusal of a message. Its text begins with the place of the message."""
    return AdmissionError(400, text, param=re.split(r"[.:]", text, maxsplit=1)[0])
