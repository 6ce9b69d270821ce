"""The items of a conversation in the responses API: checked, completed with ids, and turned into chat messages."""

import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import cast

from tiercel.server.api.schemas.fields import MAX_MESSAGES, MAX_PARTS
from tiercel.server.api.stored_items import Item, StoredItem
from tiercel.values.errors import AdmissionError

_MAX_NAME = 512
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text", "refusal")


def new_id(prefix: str) -> str:
    """Return an unguessable id."""
    return prefix + secrets.token_hex(24)


def read_items(
    value: object, find: Callable[[str], StoredItem | None], field: str = "input"
) -> list[Item | StoredItem]:
    """Check the items of a request, a text or a list in `field`, and return them.

    `find` returns the stored item with an id, for items of type item_reference. It is returned as it is: what it
    stands for may be large.
    Errors: AdmissionError (400) naming the place of the fault, (404) for a reference to an unknown item.
    """
    if value is None:
        return []
    if isinstance(value, str):
        return [_message("user", [_text_part("user", value)], {}, field)]
    if not isinstance(value, list):
        raise _wrong(field, "must be a string or a list of items")
    entries = cast(list[object], value)
    if len(entries) > MAX_MESSAGES:
        raise _wrong(field, f"at most {MAX_MESSAGES} items")
    _check_num_parts(entries, field)
    return [_item(entry, f"{field}.{index}", find) for index, entry in enumerate(entries)]


def chat_messages(
    items: Iterable[Item], instructions: str | None, num_before: int, field_before: str
) -> list[dict[str, object]]:
    """Return the chat messages of a conversation. Of each item, its texts alone are kept.

    Each message has its `place` in the request, for errors: that of its first item. The first `num_before` items are
    those of earlier responses, which `field_before` refers to.
    Thoughts, a text and calls that follow each other are one message of the assistant, as the model wrote them.
    """
    messages: list[dict[str, object]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions, "place": "instructions"})
    answer: _Answer | None = None  # the message of the assistant that is being put together
    for index, item in enumerate(items):
        place = f"input.{index - num_before}" if index >= num_before else field_before
        match item["type"]:
            case "message" if item["role"] != "assistant":
                answer = None
                messages.append({"role": item["role"], "content": _joined(item["content"]), "place": place})
            case "function_call_output":
                answer = None
                result = {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"], "place": place}
                messages.append(result)
            case kind:
                if answer is None or answer.begins_anew(kind):
                    answer = _Answer(place)
                    messages.append(answer.message)
                answer.add(item)
    for message in messages:
        if isinstance(thoughts := message.get("reasoning_content"), list):
            message["reasoning_content"] = "".join(cast(list[str], thoughts))
    return messages


class _Answer:
    """One message of the assistant, put together item by item."""

    def __init__(self, place: str) -> None:
        self.message: dict[str, object] = {"role": "assistant", "content": None, "place": place}
        self._thoughts: list[str] = []

    def begins_anew(self, kind: object) -> bool:
        """Return whether an item cannot belong to this message, because the model writes in order."""
        has_calls, has_text = "tool_calls" in self.message, self.message["content"] is not None
        return kind != "function_call" and (has_calls or has_text)

    def add(self, item: Item) -> None:
        """Add an item. Thoughts are joined once they are over: growing one text would copy it for each item."""
        match item["type"]:
            case "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                calls = cast(list[object], self.message.setdefault("tool_calls", []))
                calls.append({"id": item["call_id"], "type": "function", "function": function})
            case "reasoning":
                self._thoughts.append(_joined(item.get("content") or item.get("summary") or []))
                self.message["reasoning_content"] = self._thoughts
            case _:
                self.message["content"] = _joined(item["content"])


def _joined(content: object) -> str:
    parts = cast(list[Mapping[str, str]], content)
    return "\n".join(part.get("text", part.get("refusal", "")) for part in parts)


def _item(entry: object, place: str, find: Callable[[str], StoredItem | None]) -> Item | StoredItem:
    if not isinstance(entry, dict):
        raise _wrong(place, "must be an object")
    item = cast(dict[str, object], entry)
    kind = item.get("type", "message" if "role" in item else None)
    match kind:
        case "message":
            return _read_message(item, place)
        case "function_call":
            return {
                "type": "function_call",
                "id": _id(item, place, "fc_"),
                "call_id": _word(item, "call_id", place),
                "name": _word(item, "name", place),
                "arguments": _text(item, "arguments", place),
                "status": "completed",
            }
        case "function_call_output":
            output = item.get("output")
            return {
                "type": "function_call_output",
                "id": _id(item, place, "fco_"),
                "call_id": _word(item, "call_id", place),
                "output": output if isinstance(output, str) else _joined(_parts(output, "user", f"{place}.output")),
                "status": "completed",
            }
        case "reasoning":
            return _read_reasoning(item, place)
        case "item_reference":
            reference = _word(item, "id", place)
            found = find(reference)
            if found is None:
                raise AdmissionError(
                    404,
                    f"{place}: an item with id '{reference}' is not stored.",
                    code="item_not_found",
                    param=_field(place),
                )
            return found
        case _:
            shown = f"of type {kind[:64]}" if isinstance(kind, str) else "without a type"
            raise AdmissionError(
                400, f"{place}: an item {shown} is not supported", code="unsupported_parameter", param=_field(place)
            )


def _read_message(item: Mapping[str, object], place: str) -> Item:
    role = item.get("role")
    if role not in _ROLES:
        raise _wrong(f"{place}.role", f"must be one of {', '.join(_ROLES)}")
    content = item.get("content")
    if isinstance(content, str):
        parts = [_text_part(cast(str, role), content)]
    else:
        parts = _parts(content, cast(str, role), f"{place}.content")
    return _message(cast(str, role), parts, item, place)


def _message(role: str, parts: list[dict[str, object]], item: Mapping[str, object], place: str) -> Item:
    return {"type": "message", "id": _id(item, place, "msg_"), "role": role, "content": parts, "status": "completed"}


def _read_reasoning(item: Mapping[str, object], place: str) -> Item:
    def texts(name: str, kind: str) -> list[dict[str, object]]:
        entries = item.get(name)
        if entries and not isinstance(entries, list):
            raise _wrong(f"{place}.{name}", "must be a list")
        found: list[dict[str, object]] = []
        for index, part in enumerate(cast(list[object], entries or [])):
            if not isinstance(part, dict):
                raise _wrong(f"{place}.{name}.{index}", "must be an object")
            text = _text(cast(dict[str, object], part), "text", f"{place}.{name}.{index}")
            found.append({"type": kind, "text": text})
        return found

    return {
        "type": "reasoning",
        "id": _id(item, place, "rs_"),
        "summary": texts("summary", "summary_text"),
        "content": texts("content", "reasoning_text"),
        "status": "completed",
    }


def _parts(content: object, role: str, place: str) -> list[dict[str, object]]:
    if not isinstance(content, list):
        raise _wrong(place, "must be a string or a list of parts")
    parts: list[dict[str, object]] = []
    for index, entry in enumerate(cast(list[object], content)):
        if not isinstance(entry, dict):
            raise _wrong(f"{place}.{index}", "must be an object")
        part = cast(dict[str, object], entry)
        kind = part.get("type")
        if kind not in _TEXTS:
            shown = f"of type {kind[:64]}" if isinstance(kind, str) else "without a type"
            raise AdmissionError(
                400,
                f"{place}.{index}: a part {shown} is not supported: the model reads text only",
                code="unsupported_parameter",
                param=_field(place),
            )
        if kind == "refusal":
            parts.append({"type": "refusal", "refusal": _text(part, "refusal", f"{place}.{index}")})
        else:
            parts.append(_text_part(role, _text(part, "text", f"{place}.{index}")))
    return parts


def _text_part(role: str, text: str) -> dict[str, object]:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": text}


def _check_num_parts(entries: Iterable[object], field: str) -> None:
    """Refuse long contents before their parts are read."""
    parts = 0
    for entry in entries:
        if isinstance(entry, dict):
            item = cast(dict[str, object], entry)
            lists = [item.get(name) for name in ("content", "summary", "output")]
            parts += sum(len(cast(list[object], one)) for one in lists if isinstance(one, list))
    if parts > MAX_PARTS:
        raise _wrong(field, f"at most {MAX_PARTS} content parts")


def _id(item: Mapping[str, object], place: str, prefix: str) -> str:
    if item.get("id") in (None, ""):
        return new_id(prefix)
    return _word(item, "id", place)


def _word(item: Mapping[str, object], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_NAME:
        raise _wrong(f"{place}.{name}", f"must be a string of 1 to {_MAX_NAME} characters")
    return value


def _text(item: Mapping[str, object], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{place}.{name}", "must be a string")
    return value


def _wrong(place: str, fault: str) -> AdmissionError:
    return AdmissionError(400, f"{place} {fault}", code="invalid_value", param=_field(place))


def _field(place: str) -> str:
    """Return the field of a request that has a place."""
    return place.partition(".")[0]
