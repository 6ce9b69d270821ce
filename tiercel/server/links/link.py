"""The link to one engine: connect, shake hands, exchange frames, notice a dead or hanging engine, connect again."""

import asyncio
import contextlib
import enum
import secrets
import ssl
from collections.abc import Callable
from typing import Protocol, cast

import structlog

from tiercel.server.client.crash_book import Death, DeathKind
from tiercel.values.clock import Clock
from tiercel.values.errors import WireError
from tiercel.values.ids import EngineId, SeqId, TenantId
from tiercel.values.outcome import Gauges
from tiercel.values.request import Request
from tiercel.values.tenant import Tenants
from tiercel.wire.fleet_frames import (
    BodyDecoder,
    EngineDied,
    Framed,
    FrameSplitter,
    FrontFrame,
    HostFrame,
    HostLeaving,
    LimitUses,
    Ping,
    Pong,
    Welcome,
    frame_of,
    to_front,
    to_host,
    trail_to_front,
)
from tiercel.wire.frames import Abort, EngineNews, Loading, Ready, Report, SetTenants, SetWeights, Submit
from tiercel.wire.handshake import CHALLENGE_BYTES, NONCE_BYTES, VERDICT_BYTES, FrontHandshake
from tiercel.wire.step_record import EngineTrail

_CONNECT_S = 5.0  # for the connection, TLS and the Hello together
_PING_S = 0.5
_TICK_S = 0.1
_LATE_S = 1.0  # of a tick: this process was stopped or starved, and has not read what the engine sent meanwhile
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 2.0  # between two attempts to connect


class LinkState(enum.Enum):
    """The state of an engine as a front sees it."""

    CONNECTING = "connecting"
    LOADING = "loading"
    READY = "ready"
    LEAVING = "leaving"  # its host drains: it ends what it has
    REFUSED = "refused"  # it serves something else than the other engines


class LinkOwner(Protocol):
    """The owner of the sequences; all calls are made on the event loop, and none may block."""

    def on_engine_ready(self, link: "EngineLink", ready: Ready) -> None: ...
    def on_engine_lost(self, link: "EngineLink", death: Death) -> None: ...
    def on_engine_changed(self, link: "EngineLink") -> None: ...
    def take_report(self, link: "EngineLink", report: Report) -> None: ...
    def take_news(self, link: "EngineLink", news: EngineNews) -> None: ...
    def work_s(self, link: "EngineLink") -> float: ...
    def hear_limits(self, uses: LimitUses) -> None: ...


class WireIdentity(Protocol):
    """The secret, the certificates and the time limit that all links of a front share."""

    secret: bytes
    identity: bytes
    tls: ssl.SSLContext | None

    @property
    def heartbeat_s(self) -> float: ...


class EngineLink:
    """One engine by its address. The owner writes `engine`, `seqs` and `gauges`; the link writes everything else.

    When the engine is lost, `on_engine_lost` is called once, and nothing of that engine is delivered afterwards: its
    connection is closed, and frames of its epoch are dropped.
    """

    def __init__(
        self, host: str, port: int, tls_name: str, access: WireIdentity, owner: LinkOwner, clock: Clock
    ) -> None:
        self.host = host
        self.port = port
        self._tls_name = tls_name
        self._access = access
        self._owner = owner
        self._clock = clock
        self._session: _Session | None = None
        self._log = structlog.stdlib.get_logger("server.fleet")
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.state = LinkState.CONNECTING
        self.problem = ""  # why there is no connection, or why the engine is refused
        self.stage = "connecting"
        self.ready: Ready | None = None
        self.engine: EngineId | None = None  # of the present process, while it serves; set by the owner
        self.seqs: dict[SeqId, None] = {}  # unfinished sequences that it has
        self.gauges = Gauges()
        self.num_deaths = 0
        self.num_late_frames = 0  # of an engine that had died
        self.received_bytes = 0
        self.sent_bytes = 0
        self.key_bytes = 0  # of what was received, keys that the engine stored or dropped
        self.round_trip_s = 0.0  # the shortest of this connection
        self.host_identity = b""  # of the process of the host, the same for all fronts

    @property
    def takes_work(self) -> bool:
        """Whether sequences may be submitted."""
        return self.state is LinkState.READY

    @property
    def work_s(self) -> float:
        """Predicted time that the engine needs for the unfinished sequences of this front."""
        return self._owner.work_s(self)

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished sequences that it has."""
        return len(self.seqs)

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to its host."""
        return self._session is not None

    async def run(self) -> None:
        """Keep the link connected until the task is cancelled."""
        pause_s = _FIRST_PAUSE_S
        try:
            while True:
                session = _Session(self, self._access, self._clock)
                try:
                    async with asyncio.timeout(_CONNECT_S):
                        await asyncio.get_running_loop().create_connection(
                            lambda session=session: session,
                            self.host,
                            self.port,
                            ssl=self._access.tls,
                            server_hostname=None if self._access.tls is None else self._tls_name,
                        )
                        await session.joined
                    pause_s = _FIRST_PAUSE_S
                    await self._watch(session)
                except (OSError, WireError, TimeoutError) as error:  # ssl.SSLError is an OSError
                    self._note_problem(getattr(error, "message", "") or str(error) or "no answer in time")
                finally:
                    session.abort()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        finally:
            self._session = None

    def submit(self, request: Request) -> None:
        """Submit a sequence, which is in `seqs`."""
        if self._session is not None:
            self._session.submit(request)

    def abort(self, abort: Abort) -> None:
        """Abort sequences that it has."""
        if self._session is not None:
            self._session.abort_seqs(abort)

    def set_tenants(self, tenants: Tenants) -> None:
        """Send the tenants."""
        if self._session is not None:
            self._session.send(SetTenants(tenants))

    def set_weights(self, weights: dict[TenantId, float]) -> None:
        """Send weights of tenants that have work there."""
        if self._session is not None:
            self._session.send(SetWeights(weights))

    def tell_limits(self, uses: LimitUses) -> None:
        """Tell the other fronts of the host what this front has allowed."""
        if self._session is not None:
            self._session.send(uses)

    def refuse(self, problem: str) -> None:
        """Use the engine for nothing, because it differs from the others."""
        self.state, self.problem = LinkState.REFUSED, problem
        self._log.error("engine_refused", engine=self.address, problem=problem)

    def accept(self) -> None:
        """Use an engine that was refused: there is no other one left."""
        self.state, self.problem = LinkState.READY, ""

    # Called by the session

    def begin(self, session: "_Session") -> None:
        """Note that the host is connected."""
        self._session = session
        self.state, self.stage, self.problem = LinkState.LOADING, "starting", ""
        self.round_trip_s, self.host_identity = session.round_trip_s, session.host_identity
        self._log.info("engine_connected", engine=self.address)
        self._owner.on_engine_changed(self)

    def take(
        self, session: "_Session", message: Loading | Ready | Report | EngineNews | HostLeaving | LimitUses | Death
    ) -> None:
        """Act on a message of the host. Messages of earlier engine processes have been dropped."""
        match message:
            case LimitUses():
                # One host at two addresses passes on to this front what it has told itself.
                if message.front != self._access.identity and message.is_sane:
                    self._owner.hear_limits(message)
            case Report():
                self._owner.take_report(self, message)
            case EngineNews():
                self.key_bytes += len(message.stored) + len(message.dropped)
                self._owner.take_news(self, message)
            case Loading():
                self.stage = message.stage
                self._owner.on_engine_changed(self)
            case Ready():
                self.ready, self.state = message, LinkState.READY
                self._log.info("engine_ready", engine=self.address, epoch=session.epoch)
                self._owner.on_engine_ready(self, message)
            case HostLeaving():
                if self.state is LinkState.READY:
                    self.state = LinkState.LEAVING
                    self._log.info("engine_leaving", engine=self.address, open=len(self.seqs))
                    self._owner.on_engine_changed(self)
            case Death():
                self._lose(message, LinkState.LOADING)

    def end(self, session: "_Session", cause: str, kind: DeathKind) -> None:
        """Note that the connection is lost, and with it the engine."""
        if self._session is not session:
            return
        self._session = None
        had_progress = bool(self.seqs)
        self._lose(Death(kind=kind, cause=cause, trail=EngineTrail(), had_progress=had_progress), LinkState.CONNECTING)

    def _lose(self, death: Death, state: LinkState) -> None:
        served = self.state in (LinkState.READY, LinkState.LEAVING)
        self.state, self.stage = state, "restarting" if state is LinkState.LOADING else "connecting"
        if served:
            self.num_deaths += 1
            self._log.error("engine_lost", engine=self.address, cause=death.cause, open=len(self.seqs))
            self._owner.on_engine_lost(self, death)
        else:
            self._note_problem(death.cause)
        self._owner.on_engine_changed(self)

    async def _watch(self, session: "_Session") -> None:
        """Ping the host until the connection is lost, or ended here because nothing was heard for too long."""
        pinged_s = self._clock.now_s()
        while not session.is_lost.is_set():
            before_s = self._clock.now_s()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):  # `wait_for` drops a cancellation that comes with the event
                    await session.is_lost.wait()
            now_s = self._clock.now_s()
            if now_s - before_s > _LATE_S:
                session.heard_s = now_s
            elif now_s - session.heard_s > self._access.heartbeat_s:
                self.end(session, f"nothing was heard for {now_s - session.heard_s:.1f} s", DeathKind.HANG)
                session.abort()
                return
            if now_s - pinged_s >= _PING_S:
                pinged_s = now_s
                session.send(Ping(now_s))

    def _note_problem(self, message: str) -> None:
        if message != self.problem:  # once for each cause, not for each attempt
            self.problem = message
            self._log.warning("engine_unreachable", engine=self.address, problem=message)


class _Session(asyncio.Protocol):
    """One connection to a host."""

    def __init__(self, link: EngineLink, access: WireIdentity, clock: Clock) -> None:
        self._link = link
        self._clock = clock
        self._handshake = FrontHandshake(access.secret, access.identity, secrets.token_bytes(NONCE_BYTES))
        self._step: Callable[[bytes], bytes] | None = self._take_challenge  # None: the handshake is over
        self._bytes = bytearray()
        self._splitter = FrameSplitter()
        self._decoder: BodyDecoder[HostFrame] = BodyDecoder(cast(type[HostFrame], HostFrame))
        self._transport: asyncio.Transport | None = None
        self._base = 0
        self._offset_s: float | None = None  # the host's clock minus ours
        self._early: list[Framed] = []  # frames before the clocks are known
        self._died_epoch = 0
        self.round_trip_s = float("inf")
        self.host_identity = b""
        self.epoch = 0  # of the engine that serves
        self.heard_s = clock.now_s()
        self.joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._end("the connection was lost" if exc is None else f"the connection was lost: {exc}", None)

    def data_received(self, data: bytes) -> None:
        self.heard_s = self._clock.now_s()
        self._link.received_bytes += len(data)
        try:
            while self._step is not None and data:
                data = self._step(data)
            for frame in self._splitter.feed(data):
                if self.is_lost.is_set():
                    return
                self._take(frame)
        except WireError as error:
            self._end(str(error), error)
            self.abort()

    def send(self, message: FrontFrame) -> None:
        """Send a message; drop it if the connection is closed."""
        if self._transport is not None and not self._transport.is_closing():
            frame = frame_of(message, self.epoch)
            self._link.sent_bytes += len(frame)
            self._transport.write(frame)

    def submit(self, request: Request) -> None:
        """Send a request with the host's id and clock."""
        self.send(Submit(to_host(request, self._base, self._offset_s or 0.0)))

    def abort_seqs(self, abort: Abort) -> None:
        """Send an abort with the host's ids."""
        seqs = tuple(SeqId(seq + self._base) for seq in abort.seqs)
        self.send(Abort(seqs, abort.reason, abort.if_queued))

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def _take_challenge(self, data: bytes) -> bytes:
        part, rest = self._collect(data, CHALLENGE_BYTES)
        if part and self._transport is not None:
            self._transport.write(self._handshake.answer(part))
            self._step = self._take_verdict
        return rest

    def _take_verdict(self, data: bytes) -> bytes:
        part, rest = self._collect(data, VERDICT_BYTES)
        if part:
            self._handshake.check(part)
            self._step = None
        return rest

    def _collect(self, data: bytes, size: int) -> tuple[bytes, bytes]:
        """Return the first `size` bytes of a part of the handshake once they are there, and what follows them."""
        missing = size - len(self._bytes)
        self._bytes += data[:missing]
        if len(self._bytes) < size:
            return b"", b""
        part = bytes(self._bytes)
        self._bytes.clear()
        return part, data[missing:]

    def _take(self, frame: Framed) -> None:
        message = self._decoder.decode(frame.body)
        match message:
            case Welcome():
                self._base, self.host_identity = message.base, message.identity
                self.send(Ping(self._clock.now_s()))
            case Pong():
                self._take_pong(message)
            case _ if self._offset_s is None:
                self._early.append(frame)
            case Ready():
                if frame.epoch > self._died_epoch:
                    self.epoch = frame.epoch
                    self._link.take(self, message)
            case Report():
                if frame.epoch == self.epoch > self._died_epoch:
                    self._link.take(self, to_front(message, self._base, self._offset_s, self._link.seqs))
                else:
                    self._link.num_late_frames += 1
            case EngineNews():
                if frame.epoch == self.epoch > self._died_epoch:
                    self._link.take(self, message)
            case EngineDied():
                if frame.epoch > self._died_epoch:
                    self._died_epoch = frame.epoch
                    self._link.take(self, self._death(message))
            case _:
                self._link.take(self, message)

    def _take_pong(self, pong: Pong) -> None:
        """Estimate the difference of the clocks from the ping with the shortest round trip."""
        now_s = self._clock.now_s()
        round_trip_s = now_s - pong.sent_s
        if round_trip_s < self.round_trip_s:
            self.round_trip_s = self._link.round_trip_s = round_trip_s
            self._offset_s = pong.host_s - (pong.sent_s + now_s) / 2
        if not self.joined.done():
            self.joined.set_result(None)
            self._link.begin(self)
            early, self._early = self._early, []
            for frame in early:
                self._take(frame)

    def _death(self, died: EngineDied) -> Death:
        kinds = {kind.value: kind for kind in DeathKind}
        return Death(
            kind=kinds.get(died.kind, DeathKind.EXIT),
            cause=died.cause,
            trail=trail_to_front(died, self._base, self._link.seqs),
            had_progress=died.had_progress,
        )

    def _end(self, cause: str, error: WireError | None) -> None:
        if self.is_lost.is_set():
            return
        self.is_lost.set()
        if not self.joined.done():
            self.joined.set_exception(error or ConnectionError(cause))
        self._link.end(self, cause, DeathKind.KILLED)
