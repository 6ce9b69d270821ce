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


def described(messages: Sequence[ChatMessage], tools: str) -> list[ChatMessage]:
    """Return messages in which tools, calls and their results are plain text.

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
                plain.append(ChatMessage("user", text))
        else:
            plain.append(replace(message, content=message.content + _calls_text(message), tool_calls=""))
        is_after_result = message.role == "tool"
    return _with_tools(plain, tools) if tools else plain


def _with_tools(messages: list[ChatMessage], tools: str) -> list[ChatMessage]:
    lines = (json.dumps(tool, ensure_ascii=False) for tool in cast(list[object], json.loads(tools)))
    text = _BEFORE + "\n".join(lines) + _AFTER
    if messages[0].role == "system":
        return [replace(messages[0], content=f"{messages[0].content}\n\n{text}"), *messages[1:]]
    return [ChatMessage("system", text), *messages]


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
