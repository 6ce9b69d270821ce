"""The messages of the control socket of a daemon, one in each packet: MessagePack, never pickle.

The first message of a connection is a request. Its version must be that of the daemon which receives it.
"""

from typing import TypeVar, cast

import msgspec
from msgspec import Struct

from tiercel.values.errors import TiercelError
from tiercel.wire.encoding import encode_body

VERSION = 1
"""To be raised when a message changes its meaning: daemons of different versions may meet in a takeover."""
MAX_BYTES = 4096
MAX_FDS = 4

HTTP = "http"
ADMIN = "admin"
"""The names of the listening sockets in `Offer`: for requests, and for the operator if there is a second one."""


class ControlError(TiercelError):
    """The other side of a control socket cannot be understood, or has gone."""


class Drain(Struct, frozen=True, tag="drain"):
    """Drain and exit, as after SIGTERM. The connection ends with the daemon."""

    version: int = VERSION


class TakeOver(Struct, frozen=True, tag="take_over"):
    """Give up the SSD tier and offer the listening sockets to the process with this id."""

    pid: int
    version: int = VERSION


class Serving(Struct, frozen=True, tag="serving"):
    """The new daemon has loaded its model and accepts connections."""


class Refused(Struct, frozen=True, tag="refused"):
    """The request is not carried out. `reason` is a sentence for the operator."""

    reason: str
    version: int = VERSION


class Draining(Struct, frozen=True, tag="draining"):
    """The drain has begun. It ends `limit_s` from now at the latest."""

    limit_s: float


class Offer(Struct, frozen=True, tag="offer"):
    """The listening sockets, as descriptors in this order; the SSD folders are free."""

    pid: int
    names: tuple[str, ...]


class Leaving(Struct, frozen=True, tag="leaving"):
    """The old daemon accepts no more connections, finishes its streams and exits."""


Request = Drain | TakeOver
Answer = Refused | Draining | Offer | Leaving
Message = Request | Serving | Answer

M = TypeVar("M")


def encode(message: Message) -> bytes:
    """Return a message as the bytes of one packet."""
    return encode_body(message)


def decode(packet: bytes, kind: type[M]) -> M:
    """Return the message of a packet. Errors: ControlError, also for the empty packet of a peer that has gone."""
    if not packet:
        raise ControlError("control.closed")
    try:
        return msgspec.msgpack.decode(packet, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise ControlError("control.unreadable", reason=str(exc)) from exc


def decode_request(packet: bytes) -> Request:
    """Return the first message of a connection. Errors: see `decode`."""
    return decode(packet, cast(type[Request], Request))


def decode_answer(packet: bytes) -> Answer:
    """Return an answer of a daemon. Errors: see `decode`."""
    return decode(packet, cast(type[Answer], Answer))
