"""One engine process and the fronts that it serves: which sequence belongs to which front, and what goes where."""

import asyncio
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Protocol, cast

import msgspec
import structlog
from msgspec import Struct

from tiercel.server.client.crash_book import CrashVerdict, Death
from tiercel.server.client.status import EngineState, EngineStatus
from tiercel.server.hosting.split import split_report, window_of
from tiercel.settings.settings import EngineSettings
from tiercel.values.clock import Clock
from tiercel.values.errors import WireError
from tiercel.values.ids import KeyHead, SeqId
from tiercel.values.outcome import FinishReason
from tiercel.values.request import Request
from tiercel.values.tenant import Tenants
from tiercel.wire.fleet_frames import (
    EngineDied,
    FrameSplitter,
    HostLeaving,
    LimitUses,
    frame_body,
    frame_of,
    pack_heads,
    unpack_heads,
)
from tiercel.wire.frames import (
    Abort,
    DiskReleased,
    EngineNews,
    Failed,
    Loading,
    Quit,
    Ready,
    Report,
    SetTenants,
    Start,
    ToEngine,
    encode_frame,
)

_LENGTH = struct.Struct("<I")
_SEQ_BYTES = 8  # of a sequence id in a report


class _End(Struct, frozen=True, gc=False):
    """The id in a `Finished`; the rest is not decoded."""

    seq: SeqId


class _ReportHead(Struct, frozen=True, tag="report", gc=False):
    """The fields of a `Report` that a host needs if it passes the report on as it is."""

    seqs: bytes = b""
    finished: tuple[_End, ...] = ()


_FromEngine = Loading | Ready | Failed | DiskReleased | EngineNews | _ReportHead


class FrontPort(Protocol):
    """A connected front."""

    @property
    def number(self) -> int: ...
    def send(self, frame: bytes) -> None: ...


class _EngineSocket(asyncio.Protocol):
    """The host's end of the socket pair to the engine process. Bodies are handed on undecoded."""

    def __init__(self, on_body: Callable[[bytes], None], on_lost: Callable[[], None]) -> None:
        self._on_body = on_body
        self._on_lost = on_lost
        self._splitter = FrameSplitter(has_epochs=False)
        self._transport: asyncio.Transport | None = None
        self._log = structlog.stdlib.get_logger("server.host")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._splitter.feed(data):
                self._on_body(frame.body)
        except (WireError, msgspec.MsgspecError) as error:
            self._log.error("engine_frame_unreadable", error=str(error))
            self._on_lost()
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_lost()

    def write(self, frame: bytes) -> None:
        """Send a frame; drop it if the engine is gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def close(self) -> None:
        """Close the socket."""
        if self._transport is not None:
            self._transport.close()


class HostedEngine:
    """The engine process as its host sees it. The supervisor starts and ends it; fronts own the sequences.

    `epoch` counts the processes. Reports go to the front of each sequence; while there is one front, they are passed on
    as they are.
    """

    def __init__(self, clock: Clock, on_state: Callable[[], None]) -> None:
        """`on_state` is called when the engine is ready or gone for good."""
        self._clock = clock
        self._on_state = on_state
        self._socket: _EngineSocket | None = None
        self._decoder = msgspec.msgpack.Decoder(_FromEngine)
        self._report_decoder = msgspec.msgpack.Decoder(Report)
        self._fronts: dict[int, FrontPort] = {}
        self._seqs_by_window: dict[int, set[SeqId]] = {}  # those of a front that has left stay until they have ended
        self._suspect_until: dict[SeqId, int] = {}  # of every unfinished sequence
        self._tenants: Tenants | None = None
        self._heads: set[KeyHead] = set()  # of announced keys that the present engine holds
        self._num_tokens = 0  # that the present engine has reported
        self._is_leaving = False
        self._log = structlog.stdlib.get_logger("server.host")
        self.epoch = 0
        self.on_lost: Callable[[], None] = self.give_up
        self.status = EngineStatus(clock, has_work=lambda: bool(self._suspect_until))

    # What the supervisor uses

    @property
    def had_progress(self) -> bool:
        """Whether the engine has delivered tokens and left work undone."""
        return bool(self._num_tokens and self._suspect_until)

    @property
    def suspect_until_by_seq(self) -> Mapping[SeqId, int]:
        """Every unfinished sequence, with the tokens until which it is to run alone; 0: it need not."""
        return self._suspect_until

    @property
    def num_open(self) -> int:
        """Number of unfinished sequences."""
        return len(self._suspect_until)

    async def open(self, sock: socket.socket, settings: EngineSettings) -> None:
        """Take over the socket of an engine that was just started, and tell it what to load."""
        self.epoch += 1
        self._num_tokens = 0
        self.status.failure = None
        self.status.note_report(self._clock.now_s())
        opened = self._socket = _EngineSocket(self._receive, self._note_lost)
        await asyncio.get_running_loop().create_unix_connection(lambda: opened, sock=sock)
        self._heads.clear()
        self._to_engine(Start(settings, tells_news=True))

    def disconnect(self) -> None:
        """Close the socket to the engine, which exits if it still runs."""
        if self._socket is not None:
            self._socket.close()

    def take_verdict(self, death: Death, verdict: CrashVerdict) -> None:
        """Tell the fronts of a death: they own the sequences, and judge."""
        trail = death.trail
        died = EngineDied(
            kind=death.kind.value,
            cause=death.cause,
            had_progress=death.had_progress,
            entering=trail.entering,
            ends=trail.end_by_seq,
        )
        self._broadcast(frame_of(died, self.epoch))
        self._suspect_until.clear()
        for window in list(self._seqs_by_window):
            if window in self._fronts:
                self._seqs_by_window[window].clear()
            else:
                del self._seqs_by_window[window]

    def give_up(self) -> None:
        """Note that no other engine will be started."""
        if not self.status.is_over:
            is_failed = self.status.ready is None and self.status.failure is not None
            self.status.state = EngineState.FAILED if is_failed else EngineState.DEAD
            self.status.notify()
            self._on_state()

    async def release_disk(self, lock_fds: tuple[int, ...]) -> bool:
        """Refuse: a host is not taken over."""
        return False

    def quit(self, patience_s: float) -> None:
        """Ask the engine to persist its cache for up to `patience_s` and to exit."""
        self._to_engine(Quit(patience_s))

    def leave(self) -> None:
        """Tell the fronts to submit nothing more."""
        self._is_leaving = True
        self._broadcast(frame_of(HostLeaving(), self.epoch))

    # What the fronts use

    @property
    def num_fronts(self) -> int:
        """Number of connected fronts."""
        return len(self._fronts)

    def num_seqs_of(self, front: FrontPort) -> int:
        """Return the number of unfinished sequences of a front."""
        return len(self._seqs_by_window[front.number])

    def join(self, front: FrontPort) -> None:
        """Add a front, and tell it the engine's state."""
        self._fronts[front.number] = front
        self._seqs_by_window[front.number] = set()
        if self.status.state is EngineState.READY and self.status.ready is not None:
            front.send(frame_of(self.status.ready, self.epoch))
            if self._heads:
                front.send(frame_of(EngineNews(stored=pack_heads(self._heads)), self.epoch))
        else:
            front.send(frame_of(Loading(self.status.stage), self.epoch))
        if self._is_leaving:
            front.send(frame_of(HostLeaving(), self.epoch))

    def part(self, front: FrontPort) -> None:
        """Remove a front, and abort its sequences."""
        if self._fronts.pop(front.number, None) is None:
            return
        if seqs := self._seqs_by_window[front.number]:
            self._log.info("front_gone", front=front.number, aborted=len(seqs))
            self._to_engine(Abort(tuple(seqs), FinishReason.ABORT))
        else:
            del self._seqs_by_window[front.number]

    def submit(self, front: FrontPort, request: Request, body: bytes) -> None:
        """Pass a `Submit` on, whose encoded form is `body`. Errors: WireError if a token or the id cannot be right."""
        ready = self.status.ready
        assert ready is not None  # the front names the epoch of an engine that serves
        seqs = self._seqs_by_window[front.number]
        if request.id in seqs:
            raise WireError("wire.same_id", seq=request.id)
        for packed in (request.prompt, request.outputs):
            if len(packed) % 4 or len(packed) > 4 * ready.max_model_len:
                raise WireError("wire.prompt", bytes=len(packed), limit=4 * ready.max_model_len)
            if packed and max(memoryview(packed).cast("I")) >= ready.vocab_size:
                raise WireError("wire.token", limit=ready.vocab_size)
        if not self._suspect_until:
            self.status.note_report(self._clock.now_s())  # the silence of an idle engine does not count
        seqs.add(request.id)
        self._suspect_until[request.id] = request.suspect_until
        self._write_body(body)

    def abort(self, body: bytes) -> None:
        """Pass an `Abort` of a front's own sequences on, whose encoded form is `body`."""
        self._write_body(body)

    def set_tenants(self, tenants: Tenants) -> None:
        """Use the tenants of a front, which all fronts have in common."""
        if self._tenants is None or self._tenants.tenants != tenants.tenants:
            self._tenants = tenants
            if self.status.state is EngineState.READY:
                self._to_engine(SetTenants(tenants))

    def set_weights(self, body: bytes) -> None:
        """Pass the weights of a front on, whose encoded form is `body`."""
        self._write_body(body)

    def tell_others(self, front: FrontPort, uses: LimitUses) -> None:
        """Pass what a front has allowed on to the others. Nothing is kept: fronts tell again and again."""
        if len(self._fronts) > 1:
            frame = frame_of(uses, self.epoch)
            for number, other in list(self._fronts.items()):
                if number != front.number:
                    other.send(frame)

    def _receive(self, body: bytes) -> None:
        message: _FromEngine = self._decoder.decode(body)
        match message:
            case _ReportHead():
                self._take_report(message, body)
            case Loading():
                self.status.stage = message.stage
                self.status.note_report(self._clock.now_s())
                self.status.notify()
                self._broadcast(frame_body(body, self.epoch))
            case Ready():
                self._begin_serving(message, body)
            case EngineNews():
                self._heads.difference_update(unpack_heads(message.dropped))
                self._heads.update(unpack_heads(message.stored))
                self._broadcast(frame_body(body, self.epoch))
            case Failed():
                self.status.failure = message
                if self.status.ready is None:
                    self.give_up()
            case DiskReleased():
                pass

    def _begin_serving(self, ready: Ready, body: bytes) -> None:
        self.status.ready = ready
        self.status.state = EngineState.READY
        if self._tenants is not None:
            self._to_engine(SetTenants(self._tenants))
        self.status.note_report(self._clock.now_s())
        self.status.notify()
        self._broadcast(frame_body(body, self.epoch))
        self._on_state()

    def _take_report(self, head: _ReportHead, body: bytes) -> None:
        self.status.note_report(self._clock.now_s())
        self._num_tokens += len(head.seqs) // _SEQ_BYTES
        if len(self._fronts) == 1 == len(self._seqs_by_window):
            self._broadcast(frame_body(body, self.epoch))
        elif self._fronts:
            for window, part in split_report(self._report_decoder.decode(body), self._fronts.keys()).items():
                self._fronts[window].send(frame_of(part, self.epoch))
        for end in head.finished:
            self._forget(end.seq)
        if head.finished:
            self.status.notify()

    def _forget(self, seq: SeqId) -> None:
        self._suspect_until.pop(seq, None)
        window = window_of(seq)
        seqs = self._seqs_by_window.get(window)
        if seqs is not None:
            seqs.discard(seq)
            if not seqs and window not in self._fronts:
                del self._seqs_by_window[window]

    def _note_lost(self) -> None:
        if self.status.state is EngineState.READY:
            self.status.state = EngineState.RESTARTING
            self.status.notify()
        self.on_lost()

    def _broadcast(self, frame: bytes) -> None:
        for front in list(self._fronts.values()):
            front.send(frame)

    def _to_engine(self, message: ToEngine) -> None:
        if self._socket is not None:
            self._socket.write(encode_frame(message))

    def _write_body(self, body: bytes) -> None:
        if self._socket is not None:
            self._socket.write(_LENGTH.pack(len(body)) + body)
