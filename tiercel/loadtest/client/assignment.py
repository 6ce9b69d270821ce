"""The messages between the parent and its client processes: MessagePack with a length in front, over pipes."""

import asyncio
import struct
from typing import TypeVar

import msgspec
from msgspec import Struct

from tiercel.loadtest.load.conversation import Conversation
from tiercel.loadtest.results.record import ClientRecord
from tiercel.wire.encoding import encode_body

_LENGTH = struct.Struct("<Q")


class Job(Struct, frozen=True):
    """One conversation to hold."""

    index: int  # position in the plan
    due_s: float | None  # when it is due; None: as soon as the closed loop has a place for it
    conversation: Conversation


class Source(Struct, frozen=True, kw_only=True):
    """The load of one tenant."""

    tenant: str
    headers: dict[str, str]
    extra_body: dict[str, object]
    concurrency: int | None  # most requests at a time, over all client processes; None: no limit
    jobs: list[Job]  # in order; with a limit on concurrency, the jobs of all processes


class Assignment(Struct, frozen=True, kw_only=True, tag="assignment"):
    """The work of one client process."""

    worker: int  # number of this process, from 0
    workers: int  # number of client processes
    url: str
    is_chat: bool
    is_stream: bool
    verify: bool
    body: dict[str, object]  # fields of every request
    sources: list[Source]
    counters: str  # path of the counter file, see `SharedCounters`
    request_id_prefix: str
    stop_sending_s: float | None
    timeout_s: float
    keep_text: bool


class Go(Struct, frozen=True, tag="go"):
    """The start of the run."""

    start_s: float  # zero of all times, on the machine's monotonic clock


class Stop(Struct, frozen=True, tag="stop"):
    """Stop now: cancel the requests in flight and send the records."""


class Prepared(Struct, frozen=True, tag="prepared"):
    """The process has read its assignment."""


class Progress(Struct, frozen=True, tag="progress"):
    """Counts of a process so far."""

    sent: int
    ended: int
    failed: int
    chunks: int


class Records(Struct, frozen=True, tag="records"):
    """A part of the records."""

    records: list[ClientRecord]


class Load(Struct, frozen=True, kw_only=True, tag="load"):
    """The last message of a process: the CPU time and lag of the run."""

    cpu_s: float
    cpu_shares: list[float]  # of one core, one value per second
    lags_ms: list[float]  # how late the event loop ran a timer, a sample of the readings
    chunks: int
    chunks_by_second: list[int]
    late_sends: int
    uncounted: int  # answers without a usage, whose chunks were counted as tokens


ToWorker = Assignment | Go | Stop
FromWorker = Prepared | Progress | Records | Load

M = TypeVar("M", ToWorker, FromWorker)


def encode_frame(message: ToWorker | FromWorker) -> bytes:
    """Return the frame of a message: length and body."""
    body = encode_body(message)
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[M]) -> M | None:
    """Return the next message, or None when the peer has closed the pipe."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return decoder.decode(await reader.readexactly(length))
    except asyncio.IncompleteReadError:
        return None
