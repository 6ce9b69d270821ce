"""The faults of JSON bodies that the decoder cannot name. Only refused bodies are read here."""

import json
import math
import re
from collections.abc import Iterator
from typing import Literal, NoReturn, cast

from tiercel.values.errors import AdmissionError

_MAX_DIGITS = 308  # a float can have as many
_MAX_PARTS = 100_000  # of a body, to find its crowded field
_PART = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{\[]|[}\]]|[^"{}\[\]]+', re.DOTALL)

_Fault = Literal["twice", "range"]


class _Faulty:
    """A value that is wrong, in place of the value."""

    def __init__(self, fault: _Fault) -> None:
        self.fault: _Fault = fault


def diagnosed(body: bytes | bytearray) -> AdmissionError:
    """Return the refusal of a body with a number out of range or with a name twice in an object, by its path."""
    try:
        value: object = json.loads(
            body, parse_int=_integer, parse_float=_float, parse_constant=_constant, object_pairs_hook=_unique
        )
    except (ValueError, RecursionError):
        return not_json()
    for path, faulty in _faults(value):
        shown = ".".join(shown_name(str(part)) for part in path[:8])
        text = "the name is given more than once" if faulty.fault == "twice" else "the number is out of range"
        return AdmissionError(400, f"{shown}: {text}.", code="invalid_value", param=shown_name(str(path[0])))
    return not_json()


def crowded_field(body: bytes | bytearray) -> str | None:
    """Return the field with most of the values at the beginning of a body; None if the body is no object."""
    counts: dict[str, int] = {}
    field: str | None = None
    depth = end = 0
    last = b""
    for number, match in enumerate(_PART.finditer(body)):
        part = match[0]
        has_gap = match.start() != end  # a string without an end: to search on would take quadratic time
        if has_gap or number >= _MAX_PARTS or (depth == 0 and number and part.strip()):
            break
        end = match.end()
        if depth == 1 and part.lstrip()[:1] == b":" and last[:1] == b'"':
            field = shown_name(last[1:-1].decode("utf-8", "replace"))
        if field is not None:
            counts[field] = counts.get(field, 0) + 1 + part.count(b",") * (part[:1] != b'"')
        depth += (part in b"{[") - (part in b"}]")
        last = part
    return max(counts, key=lambda name: counts[name], default=None)


def shown_name(name: str) -> str:
    """Return a client's name of a field for a message: short, and without odd characters."""
    return re.sub(r"[^A-Za-z0-9_.-]", "?", name[:64]) or "?"


def not_json() -> AdmissionError:
    """Return the refusal of a body that is not JSON."""
    return AdmissionError(400, "The body is not valid JSON.", code="invalid_json")


def _faults(value: object) -> Iterator[tuple[tuple[str | int, ...], _Faulty]]:
    """Yield the faulty values with their paths, level by level."""
    level: list[tuple[tuple[str | int, ...], object]] = [((), value)]
    while level:
        following: list[tuple[tuple[str | int, ...], object]] = []
        for path, one in level:
            if isinstance(one, _Faulty) and path:
                yield path, one
            elif isinstance(one, dict):
                following += [((*path, name), entry) for name, entry in cast(dict[str, object], one).items()]
            elif isinstance(one, list):
                following += [((*path, index), entry) for index, entry in enumerate(cast(list[object], one))]
        level = following


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values: dict[str, object] = {}
    for name, value in pairs:
        values[name] = _Faulty("twice") if name in values else value
    return values


def _integer(digits: str) -> object:
    return _Faulty("range") if len(digits.lstrip("-")) > _MAX_DIGITS else 0


def _float(digits: str) -> object:
    return 0.0 if math.isfinite(float(digits)) else _Faulty("range")


def _constant(name: str) -> NoReturn:
    raise ValueError(name)
