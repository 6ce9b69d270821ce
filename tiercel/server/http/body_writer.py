"""The body of a response, written straight into its connection.

The `send` of ASGI runs one coroutine per layer of the application for each chunk. A stream has a chunk per step.
"""

import asyncio
import functools
from collections.abc import MutableMapping
from typing import Any, cast

from uvicorn import Config
from uvicorn.server import ServerState

from tiercel.server.http.gate import ConnectionGate, ConnectionLimits
from tiercel.server.http.guarded_protocol import GuardedProtocol

HIGH_WATER_BYTES = 64 * 1024  # unsent bytes of a connection above which asyncio pauses its writer
_EXTENSION = "tiercel.body"


class WriteBurst:
    """The writers of all responses with unsent chunks. They are flushed after the current turn of the event loop.

    So the chunks of a step leave together when the work on it is done, and clients that wake up do not delay it.
    """

    def __init__(self) -> None:
        self._writers: list[BodyWriter] = []

    def add(self, writer: "BodyWriter") -> None:
        """Add a writer."""
        if not self._writers:
            asyncio.get_running_loop().call_soon(self.flush)
        self._writers.append(writer)

    def flush(self) -> None:
        """Flush the writers."""
        writers, self._writers = self._writers, []
        now_s = asyncio.get_running_loop().time()
        for writer in writers:
            writer.flush()
            writer.sent_s = now_s


class BodyWriter:
    """Writes chunks of one response whose start has been sent. Its last chunk is sent by ASGI's `send`."""

    __slots__ = ("_buffered_bytes", "_burst", "_transport", "_unsent", "is_paused", "sent_s")

    def __init__(self, transport: asyncio.Transport, burst: WriteBurst) -> None:
        self._transport = transport
        self._burst = burst
        self._unsent = b""
        self._buffered_bytes = 0  # in the transport, after the last flush
        self.sent_s = 0.0  # time of the last burst, on the clock of the event loop
        self.is_paused = False  # the client does not read what was written; ASGI's `send` waits for it

    @property
    def is_full(self) -> bool:
        """Whether the client should be waited for: more than HIGH_WATER_BYTES are unsent, or it is paused."""
        return self.is_paused or len(self._unsent) + self._buffered_bytes > HIGH_WATER_BYTES

    @property
    def unsent_bytes(self) -> int:
        """The bytes that the kernel has not taken over yet."""
        return len(self._unsent) + self._transport.get_write_buffer_size()

    def write(self, chunk: bytes) -> None:
        """Write a chunk. It is sent with the burst, or dropped if the client has gone."""
        if not self._unsent:
            self._burst.add(self)
        self._unsent += chunk

    def flush(self) -> None:
        """Send what was written; to be called before ASGI's `send`."""
        chunk, self._unsent = self._unsent, b""
        if chunk and not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            self._buffered_bytes = self._transport.get_write_buffer_size()


class BodyWritingProtocol(GuardedProtocol):
    """An HTTP protocol that adds a `BodyWriter` to the scope of each request."""

    def __init__(
        self,
        burst: WriteBurst,
        gate: ConnectionGate,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],  # Any: as in uvicorn
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(gate, config, server_state, app_state, _loop)
        self._burst = burst
        self._writer: BodyWriter | None = None  # of the newest request

    @staticmethod
    def factory(gate: ConnectionGate | None = None) -> type[asyncio.Protocol]:
        """Return what uvicorn calls for each connection; all connections share one burst and one gate."""
        gate = gate or ConnectionGate(ConnectionLimits())
        return cast(type[asyncio.Protocol], functools.partial(BodyWritingProtocol, WriteBurst(), gate))

    def begin_request(self) -> None:
        """Start the application on a request."""
        before = self.cycle
        super().begin_request()
        if self.cycle is before or self.scope["http_version"] != "1.1" or self.pipeline:
            return  # no request, one whose body is not chunked, or one that waits for another
        self._writer = BodyWriter(self.transport, self._burst)
        self._writer.is_paused = self.flow.write_paused
        extensions = cast(dict[str, object], self.scope).setdefault("extensions", {})
        cast(dict[str, object], extensions)[_EXTENSION] = self._writer

    def pause_writing(self) -> None:
        """Note that the client does not read. Called by the transport."""
        super().pause_writing()
        if self._writer is not None:
            self._writer.is_paused = True

    def resume_writing(self) -> None:
        """Note that the client reads again. Called by the transport."""
        super().resume_writing()
        if self._writer is not None:
            self._writer.is_paused = False


def body_writer(scope: MutableMapping[str, Any]) -> BodyWriter | None:  # Any: ASGI's scope
    """Return the writer of a request, or None if its protocol has none."""
    return cast(BodyWriter | None, scope.get("extensions", {}).get(_EXTENSION))
