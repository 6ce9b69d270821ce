"""Values of foreign types in every field of every message between processes: sent as what they are, or refused.

The messages and their fields are found by walking the types, so a new message or field is tested without a line here.
"""

import logging
import socket
from collections.abc import Callable
from fractions import Fraction
from types import ModuleType
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from tests.wire.every_field import Scalar, make, message_types, scalars_of
from tiercel.engine.mailbox import EngineMailbox
from tiercel.loadtest.client import assignment
from tiercel.server.control import messages as control_messages
from tiercel.server.grammar import frames as grammar_frames
from tiercel.server.text import template_frames
from tiercel.values.errors import WireError
from tiercel.values.outcome import Gauges, TierGauges
from tiercel.values.tier import Tier
from tiercel.wire import fleet_frames, frames
from tiercel.wire.encoding import encode_body, plain_value
from tiercel.wire.fleet_frames import BodyDecoder, FrameSplitter, FrontFrame, HostFrame, frame_of
from tiercel.wire.frames import FrameReader, FromEngine, Report, ToEngine, encode_frame, encode_report


class Text(str):
    """A string of a class of its own, as markupsafe has one."""


class Tensor:
    """A tensor without dimensions, as torch has them."""

    shape = ()

    def item(self) -> int:
        return 6


FOREIGN: dict[str, object] = {
    "float64": np.float64(1.5), "float32": np.float32(0.1), "float16": np.float16(0.5), "longdouble": np.longdouble(3),
    "int64": np.int64(7), "int32": np.int32(5), "uint8": np.uint8(9), "uint64": np.uint64(8), "bool": np.bool_(False),
    "str": np.str_("numpy"), "bytes": np.bytes_(b"87654321"), "array": np.array(4), "tensor": Tensor(),
    "fraction": Fraction(1, 4), "subclass": Text("own"),
}  # fmt: skip

# The values of what is plainly a number, a text or bytes, which are right in a field of that kind.
PLAIN: dict[str, object] = {
    "float64": 1.5, "float32": float(np.float32(0.1)), "float16": 0.5, "longdouble": 3.0, "int64": 7, "int32": 5,
    "uint8": 9, "uint64": 8, "bool": False, "str": "numpy", "bytes": b"87654321", "array": 4, "tensor": 6,
    "fraction": 0.25, "subclass": "own",
}  # fmt: skip
assert FOREIGN.keys() == PLAIN.keys()

Cross = Callable[[Any], Any]  # a message, and what the peer reads


def _over_the_socket(union: Any) -> Cross:
    def cross(message: Any) -> Any:
        (found,) = FrameReader(union).feed(encode_frame(message))
        return found

    return cross


def _over_tcp(union: Any) -> Cross:
    def cross(message: Any) -> Any:
        (frame,) = FrameSplitter().feed(frame_of(message, 1))
        return BodyDecoder(union).decode(frame.body)

    return cross


WIRES: dict[str, tuple[Any, Cross]] = {
    "to the engine": (ToEngine, _over_the_socket(ToEngine)),
    "from the engine": (FromEngine, _over_the_socket(FromEngine)),
    "front to host": (FrontFrame, _over_tcp(FrontFrame)),
    "host to front": (HostFrame, _over_tcp(HostFrame)),
}
MESSAGES = [
    pytest.param(kind, cross, id=f"{name}: {kind.__name__}")
    for name, (union, cross) in WIRES.items()
    for kind in message_types(union)
]


def _to_a_worker(message: Any) -> Any:
    return msgspec.msgpack.decode(encode_body(message), type=type(message))


MODULES = (frames, fleet_frames, template_frames, grammar_frames, control_messages, assignment)
"""The modules whose structs are messages, or parts of them."""


def _structs(module: ModuleType) -> list[type[msgspec.Struct]]:
    return [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, msgspec.Struct)
        and kind.__module__ == module.__name__
        and not kind.__name__.startswith("_")
    ]


MESSAGES += [
    pytest.param(kind, _to_a_worker, id=f"{module.__name__.removeprefix('tiercel.')}: {kind.__name__}")
    for module in MODULES[2:]
    for kind in _structs(module)
]


def _fits(value: object, place: Scalar, message: type[msgspec.Struct], decoder: "msgspec.msgpack.Decoder[Any]") -> bool:
    """Return whether a plain value is right in a place, as the decoder of the type sees it."""
    try:
        decoder.decode(msgspec.msgpack.encode(make(message, place.path, value)))
    except msgspec.ValidationError:
        return False
    return True


@pytest.mark.parametrize(("message", "cross"), MESSAGES)
@pytest.mark.sampled(3)
def test_a_foreign_value_arrives_as_what_it_is_or_is_refused_by_the_sender(
    message: type[msgspec.Struct], cross: Cross
) -> None:
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(message)
    assert cross(make(message)) == make(message)
    for place in scalars_of(message):
        taken = set[str]()
        for name, value in FOREIGN.items():
            if name == "array" and place.path[-1] == "key":
                continue  # it cannot be one
            sent = make(message, place.path, value)
            if not _fits(PLAIN[name], place, message, decoder):
                # The class of a string that is a key is of no matter to msgspec: a wrong one is found by the peer.
                is_plain = place.path[-1] == "key" and isinstance(value, str)
                with pytest.raises(WireError, match="unreadable" if is_plain else "cannot be sent"):
                    cross(sent)
                continue
            assert cross(sent) == make(message, place.path, PLAIN[name]), (place, name)
            taken.add(name)
        if place.kind in (int, float, bool, bytes):
            assert taken, place


def test_every_message_of_both_wires_is_in_a_union() -> None:
    unions = {kind for union, _ in WIRES.values() for kind in message_types(union)}
    for module in (frames, fleet_frames):
        assert {kind for kind in _structs(module) if kind.__struct_config__.tag is not None} <= unions


@pytest.mark.parametrize(
    "value",
    [np.array([1, 2]), np.array([1]), np.complex64(1), 1j, object(), np.datetime64("2020-01-01")],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_is_no_number_is_refused_by_its_type(value: object) -> None:
    with pytest.raises(TypeError, match=type(value).__qualname__):
        plain_value(value)
    with pytest.raises(WireError, match=rf"Report cannot be sent.*{type(value).__qualname__}"):
        encode_frame(Report(gauges=Gauges(steps=value)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "message",
    [frames.Loading("\udc80"), frames.Quit(2**64), frames.Failed("code", "/models/\udcff")],  # type: ignore[arg-type]
    ids=["text", "number", "path"],
)
def test_plain_values_that_messagepack_cannot_hold_are_refused_as_well(message: Any) -> None:
    with pytest.raises(WireError, match=f"{type(message).__name__} cannot be sent"):
        encode_frame(message)
    with pytest.raises(WireError, match=f"{type(message).__name__} cannot be sent"):
        frame_of(message, 1)


def test_a_plain_message_is_what_msgspec_makes_of_it() -> None:
    plain, foreign = Report(gauges=Gauges(steps=3)), Report(gauges=Gauges(steps=cast(int, np.int64(3))))
    assert encode_body(plain) == encode_body(foreign) == msgspec.msgpack.encode(plain)


# ---- gauges: a report never waits for them


GAUGES = [place for place in scalars_of(Report) if place.path[0] == "gauges"]


def test_a_report_whose_gauges_cannot_be_read_is_sent_without_them(caplog: pytest.LogCaptureFixture) -> None:
    """Every gauge, with every value that it cannot hold, of plain and of foreign types."""
    wrong: list[object] = [True, "text", b"bytes", 2.5, -1j, 2**65, (1,), np.bool_(True), np.array([1, 2]), object()]
    ours, theirs = socket.socketpair()
    reader: FrameReader[FromEngine] = FrameReader(FromEngine)
    num_lost = 0
    with ours, theirs:
        mailbox = EngineMailbox(ours)
        for place in GAUGES:
            for value in wrong:
                if place.path[-1] == "key" and isinstance(value, np.ndarray):
                    continue  # it cannot be one
                sent = make(Report, place.path, value)
                mailbox.post(sent)
                (found,) = reader.feed(theirs.recv(1 << 20))
                assert isinstance(found, Report)
                assert (found.seqs, found.tokens) == (sent.seqs, sent.tokens)
                assert found.finished == sent.finished
                assert found.firsts == sent.firsts
                num_lost += found.gauges is None
    assert num_lost > 5 * len(GAUGES)
    assert caplog.text.count("gauges not sent") == 8


def test_one_cause_is_logged_once_and_names_the_gauge(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    tier = TierGauges(tier=Tier.HBM, mean_run_blocks=cast(float, np.bool_(True)))
    with ours, theirs, caplog.at_level(logging.INFO):
        mailbox = EngineMailbox(ours)
        for step in range(50):
            mailbox.post(Report(seqs=bytes(8), tokens=bytes(4), gauges=Gauges(steps=step, tiers=(tier,))))
        mailbox.post(Report(gauges=Gauges(steps=50)))
        found = FrameReader(FromEngine).feed(theirs.recv(1 << 20))
    assert [report.gauges for report in found] == [None] * 50 + [Gauges(steps=50)]
    (line,) = caplog.messages
    assert line.startswith("gauges not sent cause=")
    assert "$.gauges.tiers[0].mean_run_blocks" in line


def test_a_report_that_is_wrong_elsewhere_is_not_mended() -> None:
    with pytest.raises(WireError, match="Report cannot be sent"):
        encode_report(Report(seqs=cast(bytes, object()), gauges=Gauges()))
