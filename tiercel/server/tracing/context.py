"""The W3C trace context of a request: adopted if it is valid, ignored if it is not.

Source: https://www.w3.org/TR/trace-context/
"""

import re
import secrets

from msgspec import Struct
from starlette.datastructures import Headers

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MEMBER = re.compile(
    r"([a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
    r"=([\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e])"
)
_MAX_HEADER_LETTERS = 512
_MAX_MEMBERS = 32
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16
_SAMPLED = 1


class TraceContext(Struct, frozen=True):
    """The trace that a request belongs to."""

    trace_id: str  # 32 hex digits
    parent_id: str | None = None  # 16 hex digits: the caller's span; None if the trace begins here
    is_sampled: bool = False  # the caller records the trace; not used if the trace begins here
    state: tuple[tuple[str, str], ...] = ()  # `tracestate`: entries of other systems


def read_context(headers: Headers) -> TraceContext | None:
    """Return the caller's context; None without a valid `traceparent`."""
    parents = headers.getlist("traceparent")
    if len(parents) != 1 or len(parents[0]) > _MAX_HEADER_LETTERS:
        return None
    found = _TRACEPARENT.fullmatch(parents[0].strip(" \t"))
    if found is None:
        return None
    version, trace_id, parent_id, flags, rest = found.groups()
    if version == "ff" or (version == "00" and rest is not None) or trace_id == _NO_TRACE or parent_id == _NO_SPAN:
        return None
    return TraceContext(trace_id, parent_id, bool(int(flags, 16) & _SAMPLED), _read_state(headers))


def begin_context() -> TraceContext:
    """Return a context for a trace that begins here."""
    return TraceContext(secrets.token_hex(16))


def _read_state(headers: Headers) -> tuple[tuple[str, str], ...]:
    """Return all members of `tracestate`; none if one of them is invalid."""
    text = ",".join(headers.getlist("tracestate"))
    if not text or len(text) > _MAX_HEADER_LETTERS:
        return ()
    members: dict[str, str] = {}
    for part in text.split(","):
        member = part.strip(" \t")
        if not member:
            continue
        found = _MEMBER.fullmatch(member)
        if found is None or found[1] in members:
            return ()
        members[found[1]] = found[2]
    return tuple(members.items()) if len(members) <= _MAX_MEMBERS else ()
