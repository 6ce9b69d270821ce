"""The caller's trace context: adopted if it is valid, ignored if it is not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from tiercel.server.tracing.context import TraceContext, read_context

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"


def _read(*headers: tuple[str, str]) -> TraceContext | None:
    return read_context(Headers(raw=[(name.encode(), value.encode("latin-1")) for name, value in headers]))


def test_the_callers_context_is_adopted() -> None:
    context = _read(("traceparent", SAMPLED), ("tracestate", "congo=t61rcWkgMzE, rojo=00f067aa0ba902b7"))
    state = (("congo", "t61rcWkgMzE"), ("rojo", "00f067aa0ba902b7"))
    assert context == TraceContext(TRACE, PARENT, True, state)
    assert _read(("traceparent", UNSAMPLED)) == TraceContext(TRACE, PARENT, False)
    assert _read(("traceparent", f" 00-{TRACE}-{PARENT}-03\t")) == TraceContext(TRACE, PARENT, True)


def test_the_known_part_of_a_later_version_is_read() -> None:
    assert _read(("traceparent", f"cc-{TRACE}-{PARENT}-01-what-comes")) == TraceContext(TRACE, PARENT, True)


@pytest.mark.parametrize(
    "parent",
    [
        *("", "-", "00", "garbage", "00-" * 200, "\xff" * 55, f"{TRACE}-{PARENT}"),
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-1",
        f"00-{TRACE}-{PARENT}-zz",
        f"00-{TRACE[:-1]}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{TRACE}-{PARENT}-01\x00",
        f"cc-{TRACE}-{PARENT}-01.more",
    ],
)
def test_an_invalid_traceparent_is_ignored(parent: str) -> None:
    assert _read(("traceparent", parent), ("tracestate", "a=1")) is None


def test_two_traceparents_are_ignored() -> None:
    assert _read(("traceparent", SAMPLED), ("traceparent", SAMPLED)) is None
    assert _read(("tracestate", "a=1")) is None


@pytest.mark.parametrize("state", ["a", "a=", "=1", "A=1", "a=1,a=2", "a=1;b\xe9", "a=\x01", "a=" + "x" * 600])
def test_an_invalid_tracestate_is_dropped_and_the_traceparent_kept(state: str) -> None:
    assert _read(("traceparent", SAMPLED), ("tracestate", state)) == TraceContext(TRACE, PARENT, True)


@given(st.binary(max_size=80), st.binary(max_size=80), st.sampled_from([b"", SAMPLED.encode()]))
def test_any_bytes_give_a_context_or_none(parent: bytes, state: bytes, before: bytes) -> None:
    context = read_context(Headers(raw=[(b"traceparent", before + parent), (b"tracestate", state)]))
    assert context is None or (len(context.trace_id), len(context.parent_id or "")) == (32, 16)


def test_several_tracestates_are_one_list() -> None:
    context = _read(("traceparent", SAMPLED), ("tracestate", "a=1, ,"), ("tracestate", "b@c=2"))
    assert context is not None
    assert context.state == (("a", "1"), ("b@c", "2"))
