"""Strict reading of YAML and JSON documents that an operator writes.

PyYAML's loaders expand aliases, build objects from tags and keep the last of two equal keys. This module reads the
events of the parser instead: it refuses aliases, anchors, tags and second documents, requires unique text keys, and
reads plain values by YAML's core schema (`on` and `yes` are text).
"""

import json
import re
from collections.abc import Generator
from typing import cast

import yaml

MAX_BYTES = 1024 * 1024
MAX_DEPTH = 8

_WORDS: dict[str, bool | None] = {
    "": None,
    "~": None,
    **{spelled: None for spelled in ("null", "Null", "NULL")},
    **{spelled: True for spelled in ("true", "True", "TRUE")},
    **{spelled: False for spelled in ("false", "False", "FALSE")},
}
_WHOLE = re.compile(r"[-+]?[0-9]{1,18}")
# As in YAML 1.1, an exponent needs a sign and a decimal point; otherwise the value is text.
_NUMBER = re.compile(r"[-+]?[0-9]{1,18}\.[0-9]{0,40}([eE][-+][0-9]{1,3})?|\.[0-9]{1,40}([eE][-+][0-9]{1,3})?")

_Events = Generator[yaml.Event]


class DocumentError(Exception):
    """The text is not a valid document. The message is one line."""


def read_yaml(text: bytes) -> object:
    """Return the value of a YAML document. Errors: DocumentError."""
    _check_size(text)
    try:
        return _document(_events(text.decode("utf-8-sig")))
    except yaml.YAMLError as exc:
        raise DocumentError(f"not YAML: {_describe(exc)}") from exc
    except UnicodeDecodeError as exc:
        raise DocumentError("not YAML: the text is not UTF-8") from exc


def read_json(text: bytes) -> object:
    """Return the value of a JSON document. Errors: DocumentError."""
    _check_size(text)
    try:
        value: object = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except (ValueError, RecursionError) as exc:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise DocumentError(f"not JSON: {' '.join(str(exc).split())[:300]}") from exc
    _check_depth(value, 1)
    _check_text(value)
    return value


def _check_size(text: bytes) -> None:
    if len(text) > MAX_BYTES:
        raise DocumentError(f"{len(text):,} bytes: at most {MAX_BYTES:,} are read")


def _check_text(value: object) -> None:
    """Refuse half of a surrogate pair, which JSON may spell but UTF-8 cannot: no message could name such a key."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as exc:
        raise DocumentError(f"not JSON: {exc.object[exc.start]!r} is half of a character") from exc


def _events(text: str) -> _Events:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader exists if PyYAML was built with libyaml
    return cast(_Events, yaml.parse(text, Loader=loader))  # pyright: ignore[reportUnknownMemberType] - untyped there


def _document(events: _Events) -> object:
    value: object = None
    documents = 0
    for event in events:
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise DocumentError(f"line {_line(event)}: a second document")
        elif isinstance(event, yaml.NodeEvent):
            value = _value(event, events, 1)
    return value


def _value(event: yaml.Event, events: _Events, depth: int) -> object:
    if isinstance(event, yaml.AliasEvent):
        raise DocumentError(f"line {_line(event)}: aliases are not supported")
    if depth > MAX_DEPTH:
        raise DocumentError(f"line {_line(event)}: nests deeper than {MAX_DEPTH} levels")
    if getattr(event, "anchor", None) is not None:
        raise DocumentError(f"line {_line(event)}: anchors are not supported")
    if getattr(event, "tag", None) is not None:
        raise DocumentError(f"line {_line(event)}: tags are not supported")
    if isinstance(event, yaml.MappingStartEvent):
        return _mapping(events, depth)
    if isinstance(event, yaml.SequenceStartEvent):
        entries: list[object] = []
        while not isinstance(entry := next(events), yaml.SequenceEndEvent):
            entries.append(_value(entry, events, depth + 1))
        return entries
    assert isinstance(event, yaml.ScalarEvent)
    return _plain(event.value) if event.implicit[0] else event.value


def _mapping(events: _Events, depth: int) -> dict[str, object]:
    fields: dict[str, object] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        if not isinstance(event, yaml.ScalarEvent) or event.anchor is not None or event.tag is not None:
            raise DocumentError(f"line {_line(event)}: a key must be plain text")
        if event.value in fields:
            raise DocumentError(f"line {_line(event)}: {event.value[:64]!r} is given twice")
        fields[event.value] = _value(next(events), events, depth + 1)
    return fields


def _plain(text: str) -> object:
    """Return the value of an unquoted word."""
    if text in _WORDS:
        return _WORDS[text]
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text


def _describe(error: yaml.YAMLError) -> str:
    """Return the description of an error without the surrounding text, which may be a key."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return "the text has characters that YAML does not allow"


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)[:64]!r} is given twice")
    return fields


def _no_constant(word: str) -> object:
    raise ValueError(f"{word} is not a number")


def _check_depth(value: object, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise DocumentError(f"nests deeper than {MAX_DEPTH} levels")
    entries: list[object] = []
    if isinstance(value, dict):
        entries = list(cast(dict[str, object], value).values())
    elif isinstance(value, list):
        entries = cast(list[object], value)
    for entry in entries:
        _check_depth(entry, depth + 1)
