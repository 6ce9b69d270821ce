"""Texts of a conversation replaced: by a neutral word, or by themselves between marks. See `ChatTemplate.encode`."""

import json
import re
from collections.abc import Callable
from typing import cast

from msgspec.structs import replace

from tiercel.server.text.template_frames import ChatMessage

_NEUTRAL = "x"
_CONTENT, _CALL = "z", "k"  # the ends of the traces of contents and of calls
_TRACE = re.compile(f"{_NEUTRAL}q([0-9]{{1,9}})([{_CONTENT}{_CALL}])", re.IGNORECASE)

Change = Callable[[str], str]


def neutral_text(text: str) -> str:
    """Return a neutral word; text that is all white space stays, as templates test for it."""
    return _NEUTRAL if text.strip() else text


def marker(begin: str, end: str) -> Change:
    """Return what puts marks around a text, inside the outer white space so that trimming still works."""

    def mark(text: str) -> str:
        core = text.strip()
        if not core:
            return text
        before = text[: len(text) - len(text.lstrip())]
        return f"{before}{begin}{core}{end}{text[len(before) + len(core) :]}"

    return mark


def traced_message(message: ChatMessage, index: int) -> ChatMessage:
    """Return a message with neutral texts, which show whether a rendering has something of the message.

    Its content, and the names and arguments of its calls, are two words that no other message has.
    """

    def word(end: str) -> Change:
        return lambda text: f"{_NEUTRAL}q{index}{end}" if text.strip() else text

    neutral = changed_message(message, neutral_text)
    calls = changed_calls(message.tool_calls, word(_CALL))
    return replace(neutral, content=word(_CONTENT)(message.content), tool_calls=calls)


def traces_in(rendered: str) -> tuple[set[int], set[int]]:
    """Return the indexes of the traced messages whose content a rendering has, and of those whose calls it has.

    Letters may be of any case.
    """
    contents, calls = set[int](), set[int]()
    for index, end in _TRACE.findall(rendered):
        (contents if end.lower() == _CONTENT else calls).add(int(index))
    return contents, calls


def changed_message(message: ChatMessage, change: Change, *, keeps_content: bool = False) -> ChatMessage:
    """Return a message with its texts changed; with `keeps_content` all but the content."""
    return replace(
        message,
        content=message.content if keeps_content else change(message.content),
        name=_maybe(message.name, change),
        tool_calls=changed_calls(message.tool_calls, change),
        tool_call_id=None if message.tool_call_id is None else _changed_id(message.tool_call_id, change),
        thoughts=_maybe(message.thoughts, change),
    )


def changed_calls(calls: str, change: Change) -> str:
    """Return calls with the function's name, the id and all texts of the arguments changed, their names included."""
    if not calls:
        return ""
    changed: list[object] = []
    for call in cast(list[dict[str, object]], json.loads(calls)):
        function = cast(dict[str, object], call["function"])
        both = {
            "name": change(cast(str, function["name"])),
            "arguments": _changed_texts(function["arguments"], change),
        }
        changed.append({**call, "id": _changed_id(cast(str, call["id"]), change), "function": both})
    return json.dumps(changed, ensure_ascii=False)


def changed_tools(tools: str, change: Change, hostile: re.Pattern[str] | None) -> str:
    """Return tools with names, descriptions and all texts that match `hostile` changed.

    Other texts stay: templates compare them, such as the types of a schema.
    """
    if not tools:
        return ""

    def walk(value: object, key: str) -> object:
        if isinstance(value, str):
            is_free = key in ("name", "description") or (hostile is not None and hostile.search(value) is not None)
            return change(value) if is_free else value
        if isinstance(value, list):
            return [walk(entry, "") for entry in cast(list[object], value)]
        if isinstance(value, dict):
            return {
                change(name) if hostile is not None and hostile.search(name) else name: walk(entry, name)
                for name, entry in cast(dict[str, object], value).items()
            }
        return value

    return json.dumps(walk(json.loads(tools), ""), ensure_ascii=False)


def texts_match(text: str, pattern: re.Pattern[str]) -> bool:
    """Return whether a text in a JSON document, or the name of a field, matches."""
    if not text:
        return False
    found: list[object] = [json.loads(text)]
    for value in found:  # which grows
        if isinstance(value, str):
            if pattern.search(value):
                return True
        elif isinstance(value, dict):
            found += [*cast(dict[str, object], value).keys(), *cast(dict[str, object], value).values()]
        elif isinstance(value, list):
            found += cast(list[object], value)
    return False


def _changed_id(id: str, change: Change) -> str:
    """Return an id changed, unless it is of letters and digits: some templates accept no others."""
    return id if id.isalnum() else change(id)


def _maybe(text: str | None, change: Change) -> str | None:
    return None if text is None else change(text)


def _changed_texts(value: object, change: Change) -> object:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_changed_texts(entry, change) for entry in cast(list[object], value)]
    if isinstance(value, dict):
        changed: dict[str, object] = {}
        for name, entry in cast(dict[str, object], value).items():
            new = change(name)
            changed[new if new not in changed else f"{new}{len(changed)}"] = _changed_texts(entry, change)
        return changed
    return value
