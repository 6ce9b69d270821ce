"""Tools for chat templates that do not know them: described in the system message, in the manner of Hermes."""

import json
from collections.abc import Sequence
from typing import cast

from msgspec.structs import replace

from tiercel.server.text.template_frames import ChatMessage

_BEFORE = "You can call these functions, which are given as JSON:\n<tools>\n"
_AFTER = (
    "\n</tools>\nTo call a function, write a JSON object with its name and its arguments, like this:\n"
    '<tool_call>\n{"name": "the name", "arguments": {"an argument": "its value"}}\n</tool_call>'
)


PROMPT_MARKS = frozenset({"<tools>", "</tools>", "<tool_response>", "</tool_response>"})
"""The marks that are written here, but for those of calls."""


def described(messages: Sequence[ChatMessage], tools: str, *, has_system: bool = True) -> list[ChatMessage]:
    """Return messages in which tools, calls and their results are plain text.

    Tools are described in the system message, or before the first message if the template shows no system message.
    Results become messages of the user, because such templates know no other role; neighbouring ones become one.
    """
    plain: list[ChatMessage] = []
    is_after_result = False
    for message in messages:
        if message.role == "tool":
            text = f"<tool_response>\n{message.content}\n</tool_response>"
            if is_after_result:
                plain[-1] = replace(plain[-1], content=f"{plain[-1].content}\n{text}")
            else:
                plain.append(ChatMessage("user", text, place=message.place, sent_role=message.sent_role or "tool"))
        else:
            plain.append(replace(message, content=message.content + _calls_text(message), tool_calls=""))
        is_after_result = message.role == "tool"
    return _with_tools(plain, tools, has_system=has_system) if tools else plain


def _with_tools(messages: list[ChatMessage], tools: str, *, has_system: bool) -> list[ChatMessage]:
    lines = (json.dumps(tool, ensure_ascii=False) for tool in cast(list[object], json.loads(tools)))
    text = _BEFORE + "\n".join(lines) + _AFTER
    for index, message in enumerate(messages):
        if message.role == "system":
            told = replace(message, content=f"{message.content}\n\n{text}")
            return [*messages[:index], told, *messages[index + 1 :]]
    if not has_system:
        return [replace(messages[0], content=f"{text}\n\n{messages[0].content}"), *messages[1:]]
    return [ChatMessage("system", text, place="tools"), *messages]


def _calls_text(message: ChatMessage) -> str:
    if not message.tool_calls:
        return ""
    calls = cast(list[dict[str, dict[str, object]]], json.loads(message.tool_calls))
    lines = (
        json.dumps({"name": call["function"]["name"], "arguments": call["function"]["arguments"]}, ensure_ascii=False)
        for call in calls
    )
    text = "\n".join(f"<tool_call>\n{line}\n</tool_call>" for line in lines)
    return f"\n{text}" if message.content else text
