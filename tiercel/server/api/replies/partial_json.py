"""JSON objects of which a part is missing."""

import json

import msgspec
from pydantic_core import from_json


def partial_object(text: str) -> msgspec.Raw:
    """Return the JSON of an object as far as the text has it: an object as it is, a cut one without what is unfinished.

    A cut text is read as the Anthropic SDK reads the pieces of a stream (`from_json(..., partial_mode=True)`). Of a
    text that is no JSON, the part before the first fault is read; {} if there is none.
    """
    if isinstance(_decoded(text), dict):
        return msgspec.Raw(text.encode())
    for part in (text, text[: _fault_in(text)]):
        try:
            value: object = from_json(part, allow_partial=True, allow_inf_nan=False)
        except ValueError:
            continue
        if isinstance(value, dict):
            return msgspec.Raw(json.dumps(value, ensure_ascii=False).encode())
    return msgspec.Raw(b"{}")


def _decoded(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None


def _fault_in(text: str) -> int:
    """Return the number of characters before the first that cannot be, in a text that is no JSON."""
    try:
        json.loads(text)
    except json.JSONDecodeError as exc:
        return exc.pos
    except (ValueError, RecursionError):  # a number of thousands of digits
        pass
    return len(text)
