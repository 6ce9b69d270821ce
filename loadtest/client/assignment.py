"""What the parent and its client processes say to each other: a length and MessagePack, over pipes."""

import asyncio
import struct
from typing import TypeVar

import msgspec
from msgspec import Struct

from tiercel.loadtest.load.conversation import Conversation
from tiercel.loadtest.results.record import RequestRecord

_LENGTH = struct.Struct("<Q")
_encoder = msgspec.msgpack.Encoder()


class Job(Struct, frozen=True):
    """A conversation and when it is due. None: as soon as there is room for it (closed loop)."""

    index: int
    due_s: float | None
    conversation: Conversation


class Source(Struct, frozen=True, kw_only=True):
    """One tenant's load."""

    tenant: str
    headers: dict[str, str]
    extra_body: dict[str, object]
    concurrency: int | None  # of all client processes together
    jobs: list[Job]  # in order; with a limit on concurrency those of all processes


class Assignment(Struct, frozen=True, kw_only=True, tag="assignment"):
    """The work of one client process."""

    worker: int  # its number
    workers: int  # how many there are
    url: str
    is_chat: bool
    is_stream: bool
    verify: bool
    body: dict[str, object]  # fields of every request
    sources: list[Source]
    tickets: str  # file that all processes draw their turns from
    request_id_prefix: str
    stop_sending_s: float | None
    timeout_s: float
    keep_text: bool


class Go(Struct, frozen=True, tag="go"):
    """The zero of all times, on the machine's monotonic clock."""

    start_s: float


class Stop(Struct, frozen=True, tag="stop"):
    """End now: give up what is in flight and hand in what there is."""


class Prepared(Struct, frozen=True, tag="prepared"):
    """The process has read its assignment."""


class Progress(Struct, frozen=True, tag="progress"):
    """How far a process is."""

    sent: int
    ended: int
    failed: int
    chunks: int


class Records(Struct, frozen=True, tag="records"):
    """Some of the records."""

    records: list[RequestRecord]


class Load(Struct, frozen=True, kw_only=True, tag="load"):
    """The last word of a process: what the run cost it."""

    cpu_s: float
    cpu_shares: list[float]  # of one core, a value a second
    lags_ms: list[float]  # how late the event loop was, many readings
    chunks: int
    chunks_by_second: list[int]
    late_sends: int
    uncounted: int  # answers without a usage: their chunks were counted as tokens


ToWorker = Assignment | Go | Stop
FromWorker = Prepared | Progress | Records | Load

M = TypeVar("M", ToWorker, FromWorker)


def encode_frame(message: ToWorker | FromWorker) -> bytes:
    """One message as length and body."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[M]) -> M | None:
    """The next message. None: the peer is gone."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return decoder.decode(await reader.readexactly(length))
    except asyncio.IncompleteReadError:
        return None
