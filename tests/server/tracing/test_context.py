"""The caller's trace context: taken over where it is right, ignored where it is not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from tiercel.server.tracing.context import TraceContext, read_context

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"


def _read(*headers: tuple[str, str]) -> TraceContext | None:
    return read_context(Headers(raw=[(name.encode(), value.encode("latin-1")) for name, value in headers]))


def test_the_context_of_the_caller_is_taken_over() -> None:
    context = _read(("traceparent", SAMPLED), ("tracestate", "congo=t61rcWkgMzE, rojo=00f067aa0ba902b7"))
    state = (("congo", "t61rcWkgMzE"), ("rojo", "00f067aa0ba902b7"))
    assert context == TraceContext(TRACE, PARENT, True, state)
    assert _read(("traceparent", UNSAMPLED)) == TraceContext(TRACE, PARENT, False)
    assert _read(("traceparent", f" 00-{TRACE}-{PARENT}-03\t")) == TraceContext(TRACE, PARENT, True)


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
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
def test_a_wrong_traceparent_does_not_count(parent: str) -> None:
    assert _read(("traceparent", parent), ("tracestate", "a=1")) is None


def test_two_traceparents_do_not_count() -> None:
    assert _read(("traceparent", SAMPLED), ("traceparent", SAMPLED)) is None
    assert _read(("tracestate", "a=1")) is None


@pytest.mark.parametrize("state", ["a", "a=", "=1", "A=1", "a=1,a=2", "a=1;b\xe9", "a=\x01", "a=" + "x" * 600])
def test_a_wrong_tracestate_is_dropped_alone(state: str) -> None:
    assert _read(("traceparent", SAMPLED), ("tracestate", state)) == TraceContext(TRACE, PARENT, True)


@given(st.binary(max_size=80), st.binary(max_size=80), st.sampled_from([b"", SAMPLED.encode()]))
def test_any_bytes_are_a_context_or_none(parent: bytes, state: bytes, before: bytes) -> None:
    context = read_context(Headers(raw=[(b"traceparent", before + parent), (b"tracestate", state)]))
    assert context is None or (len(context.trace_id), len(context.parent_id or "")) == (32, 16)


def test_several_tracestates_are_one_list() -> None:
    context = _read(("traceparent", SAMPLED), ("tracestate", "a=1, ,"), ("tracestate", "b@c=2"))
    assert context is not None
    assert context.state == (("a", "1"), ("b@c", "2"))
