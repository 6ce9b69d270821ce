"""The connection of one front to a host: handshake, limits, and the frames of the front."""

import asyncio
import math
import secrets
from typing import Protocol, cast

import structlog

from tiercel.server.client.status import EngineState
from tiercel.server.hosting.hosted_engine import HostedEngine
from tiercel.values.clock import Clock
from tiercel.values.errors import WireError
from tiercel.values.ids import SeqId
from tiercel.wire.fleet_frames import (
    MAX_FRONTS,
    WINDOW_BITS,
    BodyDecoder,
    Framed,
    FrameSplitter,
    FrontFrame,
    LimitUses,
    Ping,
    Pong,
    Welcome,
    frame_of,
)
from tiercel.wire.frames import Abort, SetTenants, SetWeights, Submit
from tiercel.wire.handshake import HELLO_BYTES, NONCE_BYTES, HelloVerdict, HostHandshake

HELLO_S = 5.0
"""The time in which a front has to say its Hello."""

FRONT_SILENCE_S = 30.0
"""The time without a byte from a front, which pings twice a second, after which its connection is ended."""

MAX_STRANGERS = 64
"""The maximum number of connections without a Hello."""

MAX_CONNECTED_FRONTS = 64
MAX_FRONT_SEQS = 65_536
"""The maximum number of unfinished sequences of one front."""

MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""The maximum of bytes that a front has not read, beyond which its connection is ended."""

_CHECK_S = 1.0
_OTHER_FRAME_BYTES = 16 * 1024 * 1024  # tenants, or a request without its tokens
_TOKEN_BYTES = 8  # of a token of the context: it may be in the prompt, and counted again with the outputs


class Hall(Protocol):
    """The host's knowledge of all connections."""

    secret: bytes
    identity: bytes
    num_strangers: int

    def next_number(self) -> int: ...


class FrontSession(asyncio.Protocol):
    """One connection. A front that breaks a rule is disconnected, which aborts its sequences and nobody else's."""

    def __init__(self, engine: HostedEngine, hall: Hall, clock: Clock) -> None:
        self._engine = engine
        self._hall = hall
        self._clock = clock
        self._handshake = HostHandshake(hall.secret, secrets.token_bytes(NONCE_BYTES))
        self._hello = bytearray()
        self._splitter = FrameSplitter(_OTHER_FRAME_BYTES)
        self._decoder: BodyDecoder[FrontFrame] = BodyDecoder(cast(type[FrontFrame], FrontFrame))
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heard_s = clock.now_s()
        self._log = structlog.stdlib.get_logger("server.host")
        self._is_stranger = False
        self._identity = b""
        self.number = 0  # of the window of ids; 0: it has not said its Hello

    @property
    def _base(self) -> int:
        return self.number << WINDOW_BITS

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._hall.num_strangers >= MAX_STRANGERS:
            self._transport.abort()
            return
        self._is_stranger = True
        self._hall.num_strangers += 1
        if self._hall.num_strangers == MAX_STRANGERS:  # one line when it begins, not one for each connection
            self._log.warning("connections_refused", reason="too many have said no Hello", limit=MAX_STRANGERS)
        self._transport.write(self._handshake.challenge)
        self._timer = asyncio.get_running_loop().call_later(HELLO_S, self._end, "no Hello in time")

    def data_received(self, data: bytes) -> None:
        self._heard_s = self._clock.now_s()
        try:
            if not self.number:
                data = self._take_hello(data)
            if self.number:
                self._allow_frames()
                for frame in self._splitter.feed(data):
                    if self._transport is None or self._transport.is_closing():
                        return
                    self._take(frame)
        except WireError as error:
            self._end(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._leave_strangers()
        if self._timer is not None:
            self._timer.cancel()
        if self.number:
            self._engine.part(self)

    def send(self, frame: bytes) -> None:
        """Send a frame. A front that does not read is disconnected."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._end("it does not read")
            return
        self._transport.write(frame)

    def _take_hello(self, data: bytes) -> bytes:
        """Collect the bytes of the Hello and answer it. Return what follows it. Errors: WireError."""
        missing = HELLO_BYTES - len(self._hello)
        self._hello += data[:missing]
        if len(self._hello) < HELLO_BYTES or self._transport is None:
            return b""
        result = self._handshake.judge(bytes(self._hello), is_full=self._engine.num_fronts >= MAX_CONNECTED_FRONTS)
        self._transport.write(result.reply)
        if result.verdict is not HelloVerdict.ACCEPTED:
            raise WireError(f"wire.{result.verdict.name.lower()}")
        self._leave_strangers()
        self._identity = result.front
        self.number = self._hall.next_number()
        if self.number > MAX_FRONTS:
            raise WireError("wire.too_many_fronts", limit=MAX_FRONTS)
        self._log.info("front_joined", front=self.number, peer=self._transport.get_extra_info("peername"))
        self.send(frame_of(Welcome(self._hall.identity, self._base), self._engine.epoch))
        self._engine.join(self)
        self._check()
        return data[missing:]

    def _take(self, frame: Framed) -> None:
        """Act on one frame. Errors: WireError."""
        message = self._decoder.decode(frame.body)
        if isinstance(message, Ping):
            self.send(frame_of(Pong(message.sent_s, self._clock.now_s()), self._engine.epoch))
            return
        if isinstance(message, SetTenants):
            self._engine.set_tenants(message.tenants)
            return
        if isinstance(message, LimitUses):
            if not message.is_sane:
                raise WireError("wire.limit_use", front=self.number)
            self._engine.tell_others(self, LimitUses(message.uses, message.number, self._identity))
            return
        if frame.epoch != self._engine.epoch or self._engine.status.state is not EngineState.READY:
            return  # it was meant for an engine that has died; the front will hear of that, or has heard
        match message:
            case Submit(request):
                self._check_own((request.id,))
                if self._engine.num_seqs_of(self) >= MAX_FRONT_SEQS:
                    raise WireError("wire.too_many_sequences", limit=MAX_FRONT_SEQS)
                self._engine.submit(self, request, frame.body)
            case SetWeights(weights):
                if not all(0 < weight < math.inf for weight in weights.values()):
                    raise WireError("wire.weight", front=self.number)
                self._engine.set_weights(frame.body)
            case Abort(seqs):
                self._check_own(seqs)
                self._engine.abort(frame.body)

    def _check_own(self, seqs: tuple[SeqId, ...]) -> None:
        if any(seq >> WINDOW_BITS != self.number for seq in seqs):
            raise WireError("wire.foreign_id", front=self.number)

    def _allow_frames(self) -> None:
        """Allow frames as long as a prompt of this model may be."""
        ready = self._engine.status.ready
        if ready is not None:
            self._splitter.limit_bytes = _OTHER_FRAME_BYTES + _TOKEN_BYTES * ready.max_model_len

    def _check(self) -> None:
        """End the connection if nothing was heard for too long; look again later."""
        if self._clock.now_s() - self._heard_s > FRONT_SILENCE_S:
            self._end("it is silent")
        else:
            self._timer = asyncio.get_running_loop().call_later(_CHECK_S, self._check)

    def _leave_strangers(self) -> None:
        if self._is_stranger:
            self._is_stranger = False
            self._hall.num_strangers -= 1
            if self._timer is not None:
                self._timer.cancel()

    def _end(self, reason: str) -> None:
        """Disconnect the front."""
        if self._transport is None:
            return
        peer = self._transport.get_extra_info("peername")
        self._log.warning("front_refused", front=self.number, peer=peer, reason=reason)
        if self.number:
            self._transport.abort()  # what is unsent would keep the connection open
            self._engine.part(self)
        else:
            self._transport.close()  # the verdict is sent first
