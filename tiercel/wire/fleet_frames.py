"""The frames between a front and the host of an engine, behind the handshake (`tiercel.wire.handshake`).

A frame is a little-endian uint32 length, a uint32 epoch and a MessagePack body of that length. The epoch is the number
of the engine process that a frame concerns, counted from 1 by its host; a frame of another epoch than the present one
is dropped by either side. Both processes use the structs of `tiercel.wire.frames` where they mean the same.

The ids of sequences are those of the host's window for this connection: `Welcome.base` plus the front's own id.
"""

import struct
from array import array
from collections.abc import Collection, Container
from typing import Generic, NamedTuple, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from tiercel.values.errors import WireError
from tiercel.values.ids import KeyHead, SeqId, TenantId
from tiercel.values.limit_use import LimitUse
from tiercel.values.outcome import Finished, Gauges
from tiercel.values.request import Request
from tiercel.wire.encoding import encode_body
from tiercel.wire.frames import (
    MAX_FRAME_BYTES,
    Abort,
    EngineNews,
    Loading,
    Ready,
    Report,
    SetTenants,
    SetWeights,
    Submit,
)
from tiercel.wire.step_record import ANY_SEQ, EngineTrail

WINDOW_BITS = 44
"""A connection has ids for 2 ** 44 sequences; more than a front submits in a century."""

MAX_FRONTS = (1 << (63 - WINDOW_BITS)) - 1
"""The number of connections that a host can tell apart in its life."""

MAX_LIMIT_USES = 10_000
"""The maximum number of tenants in one `LimitUses`: as many as a tenants file may have."""

_HEAD = struct.Struct("<II")  # bytes of the body, epoch
_BARE_HEAD = struct.Struct("<I")  # of the frames of `tiercel.wire.frames`: bytes of the body


# front -> host


class Ping(Struct, frozen=True, tag="ping"):
    """Asks for a `Pong`. A host that hears nothing of a front for long ends the connection."""

    sent_s: float  # CLOCK_MONOTONIC of the front


class LimitUses(Struct, frozen=True, tag="limits"):
    """The use of limits that a front has allowed its active tenants. The host passes it on to its other fronts at once.

    `number` counts the messages of the front. `front`: the identity of the front; the host writes the one of the Hello.
    """

    uses: dict[TenantId, LimitUse]
    number: int
    front: bytes = b""

    @property
    def is_sane(self) -> bool:
        """Whether no figure is nonsense. A peer may send anything."""
        return len(self.uses) <= MAX_LIMIT_USES and all(use.is_sane for use in self.uses.values())


# host -> front


class Welcome(Struct, frozen=True, tag="welcome"):
    """The first frame of a host: `identity` is that of its process, `base` the first id of this connection's window."""

    identity: bytes
    base: int


class Pong(Struct, frozen=True, tag="pong"):
    """The answer to a `Ping`, at once, whatever the engine does."""

    sent_s: float  # of the ping
    host_s: float  # CLOCK_MONOTONIC of the host


class EngineDied(Struct, frozen=True, kw_only=True, tag="died"):
    """The engine process of this epoch has ended. The front moves its sequences; the host starts another engine.

    `ends` and `entering` are what it worked on (see `EngineTrail`); sequences of other fronts are in it under ids that
    the front does not know, because their number matters.
    """

    kind: str  # a `DeathKind`
    cause: str
    had_progress: bool
    entering: SeqId | None = None
    ends: dict[SeqId, int] = {}


class HostLeaving(Struct, frozen=True, tag="leaving"):
    """The host is draining: submit nothing more; what it computes goes on until its limit."""


FrontFrame = Ping | Submit | Abort | SetTenants | SetWeights | LimitUses
HostFrame = Welcome | Pong | Loading | Ready | Report | EngineNews | EngineDied | HostLeaving | LimitUses

M = TypeVar("M", FrontFrame, HostFrame)


class Framed(NamedTuple):
    """The body of one frame and its epoch."""

    epoch: int
    body: bytes


def frame_of(message: FrontFrame | HostFrame, epoch: int) -> bytes:
    """Return a message as a frame. Errors: as `tiercel.wire.encode_frame`."""
    return frame_body(encode_body(message), epoch)


def frame_body(body: bytes, epoch: int) -> bytes:
    """Return an encoded message as a frame. Errors: WireError if it is longer than MAX_FRAME_BYTES."""
    if len(body) > MAX_FRAME_BYTES:
        raise WireError("wire.too_large", bytes=len(body), limit=MAX_FRAME_BYTES)
    return _HEAD.pack(len(body), epoch) + body


class FrameSplitter:
    """Cuts a stream of bytes into frames.

    A length above `limit_bytes`, which may be changed at any time, is refused before any byte of the body is kept. So
    the memory for a peer is bounded by the limit and what arrives at once.
    """

    def __init__(self, limit_bytes: int = MAX_FRAME_BYTES, *, has_epochs: bool = True) -> None:
        """Without epochs, the frames are those of `tiercel.wire.frames`."""
        self.limit_bytes = limit_bytes
        self._head = _HEAD if has_epochs else _BARE_HEAD
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> list[Framed]:
        """Return the frames completed by `chunk`. Errors: WireError for a frame above the limit."""
        self._buffer += chunk
        frames: list[Framed] = []
        start = 0
        while len(self._buffer) - start >= self._head.size:
            length, *epoch = self._head.unpack_from(self._buffer, start)
            if length > self.limit_bytes:
                self._buffer.clear()
                raise WireError("wire.too_large", bytes=length, limit=self.limit_bytes)
            body = start + self._head.size
            if len(self._buffer) < body + length:
                break
            frames.append(Framed(epoch[0] if epoch else 0, bytes(self._buffer[body : body + length])))
            start = body + length
        del self._buffer[:start]
        return frames


class BodyDecoder(Generic[M]):
    """Decodes the bodies of frames into the messages of one direction."""

    def __init__(self, union: type[M]) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)

    def decode(self, body: bytes) -> M:
        """Return the message. Errors: WireError if it is none, or has a field of the wrong type."""
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as exc:
            raise WireError("wire.unreadable", reason=str(exc)) from exc


def unpack_heads(packed: bytes) -> list[KeyHead]:
    """Return the heads of keys in a field of `EngineNews`. Errors: WireError if its length is no multiple of 8."""
    if len(packed) % 8:
        raise WireError("wire.unreadable", reason=f"{len(packed)} bytes of keys")
    return [KeyHead(head) for (head,) in struct.iter_unpack("<Q", packed)]


def pack_heads(heads: Collection[KeyHead]) -> bytes:
    """Return heads of keys as a field of `EngineNews`."""
    return struct.pack(f"<{len(heads)}Q", *heads)


# Ids and clocks of the two sides


def to_host(request: Request, base: int, offset_s: float) -> Request:
    """Return a request as the host knows it: with an id of the window, and with the host's clock.

    `offset_s`: the host's clock minus the front's.
    """
    return replace(request, id=SeqId(request.id + base), arrival_s=request.arrival_s + offset_s)


def to_front(report: Report, base: int, offset_s: float, known: Container[SeqId]) -> Report:
    """Return a report as the front knows it. Sequences that are not `known` to be at this engine are left out."""
    seqs = [SeqId(seq - base) for seq in memoryview(report.seqs).cast("Q")]
    tokens = report.tokens
    if not all(seq in known for seq in seqs):
        pairs = zip(seqs, memoryview(tokens).cast("I"), strict=False)
        kept = [(seq, token) for seq, token in pairs if seq in known]
        seqs = [seq for seq, _ in kept]
        tokens = array("I", [token for _, token in kept]).tobytes()
    own = _Own(base, known)
    return Report(
        seqs=array("Q", seqs).tobytes(),
        tokens=tokens,
        logprobs=tuple(replace(part, seq=own.id_of(part.seq)) for part in report.logprobs if own.has(part.seq)),
        prompts=tuple(replace(part, seq=own.id_of(part.seq)) for part in report.prompts if own.has(part.seq)),
        pooled=tuple(replace(part, seq=own.id_of(part.seq)) for part in report.pooled if own.has(part.seq)),
        firsts=tuple(
            replace(first, seq=own.id_of(first.seq), started_s=first.started_s - offset_s)
            for first in report.firsts
            if own.has(first.seq)
        ),
        finished=tuple(_finished(end, own, offset_s) for end in report.finished if own.has(end.seq)),
        gauges=None if report.gauges is None else _gauges(report.gauges, own),
    )


def trail_to_front(died: EngineDied, base: int, known: Container[SeqId]) -> EngineTrail:
    """Return what the engine worked on under the front's ids; what is foreign keeps an id that no sequence has."""

    def own(seq: SeqId) -> SeqId:
        return SeqId(seq - base) if SeqId(seq - base) in known else seq

    entering = died.entering
    if entering is not None and entering != ANY_SEQ:
        entering = own(entering)
    return EngineTrail(entering, {own(seq): end for seq, end in died.ends.items()})


class _Own(NamedTuple):
    """The sequences of the front in the window of a connection."""

    base: int
    known: Container[SeqId]

    def id_of(self, seq: SeqId) -> SeqId:
        return SeqId(seq - self.base)

    def has(self, seq: SeqId) -> bool:
        return SeqId(seq - self.base) in self.known


def _finished(end: Finished, own: _Own, offset_s: float) -> Finished:
    absences = tuple(
        replace(absence, start_s=absence.start_s - offset_s, end_s=absence.end_s - offset_s) for absence in end.absences
    )
    return replace(end, seq=own.id_of(end.seq), absences=absences)


def _gauges(gauges: Gauges, own: _Own) -> Gauges:
    sequences = tuple(replace(one, seq=own.id_of(one.seq)) for one in gauges.sequences if own.has(one.seq))
    return replace(gauges, sequences=sequences) if gauges.sequences else gauges
