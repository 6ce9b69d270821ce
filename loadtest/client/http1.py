"""HTTP/1.1 as an httpx transport that stamps every piece of a response the moment the event loop gets it.

httpx's own transport costs about 100 us a chunk, spent between the socket and the caller's `async for`; a stream of
tokens is nothing but chunks. Here a piece is stamped and handed on inside the event loop's read callback.
"""

import asyncio
import contextlib
import ssl
from collections import defaultdict
from collections.abc import AsyncIterator, Callable

import httpx

from tiercel.clock import Clock
from tiercel.loadtest.client.http1_body import BodyReader, ProtocolFault, body_reader

Sink = Callable[[float, bytes], None]
"""Takes the time of arrival and a piece of the body."""

BODY = "tiercel_body"
"""Extension of a response: its `ArrivingBody`, which httpx wraps otherwise."""

SENT_S = "tiercel_sent_s"
"""Extension of a request: when the transport was handed it, before any connection was made for it."""

_MAX_HEAD_BYTES = 256 * 1024
_Origin = tuple[str, str, int]


class Http1Transport(httpx.AsyncBaseTransport):
    """Keep-alive connections without a limit: one a request in flight."""

    def __init__(self, clock: Clock, *, connect_s: float, verify: ssl.SSLContext) -> None:
        self._clock = clock
        self._connect_s = connect_s
        self._verify = verify
        self._idle: defaultdict[_Origin, list[_Connection]] = defaultdict(list)
        self._open: set[_Connection] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send, and return when the head of the response is there; its extension BODY is an `ArrivingBody`."""
        request.extensions[SENT_S] = self._clock.now_s()
        message = _head_bytes(request) + await request.aread()
        url = request.url
        origin = (url.scheme, url.host, url.port or (443 if url.scheme == "https" else 80))
        while (connection := self._take_idle(origin)) is not None:
            with contextlib.suppress(_StaleConnectionError):
                return await self._exchange(connection, message, request, is_reused=True)
        connection = await self._connect(origin, request)
        return await self._exchange(connection, message, request, is_reused=False)

    async def aclose(self) -> None:
        """Close every connection."""
        for connection in tuple(self._open):
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # the sockets close in the loop's next turn

    def _take_idle(self, origin: _Origin) -> "_Connection | None":
        idle = self._idle[origin]
        while idle:
            connection = idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self, origin: _Origin, request: httpx.Request) -> "_Connection":
        scheme, host, port = origin
        loop = asyncio.get_running_loop()
        context = self._verify if scheme == "https" else None
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._clock, self._open, self._idle[origin]), host, port, ssl=context
                )
        except TimeoutError as exc:
            raise httpx.ConnectTimeout(f"no connection within {self._connect_s:g} s", request=request) from exc
        except OSError as exc:
            raise httpx.ConnectError(exc.strerror or str(exc), request=request) from exc
        return connection

    async def _exchange(
        self, connection: "_Connection", message: bytes, request: httpx.Request, *, is_reused: bool
    ) -> httpx.Response:
        body = connection.send(message)
        try:
            status, headers = await body.head
        except _StaleConnectionError as exc:
            if is_reused:
                raise
            raise httpx.RemoteProtocolError("the server closed the connection without an answer") from exc
        except ProtocolFault as exc:
            raise httpx.RemoteProtocolError(str(exc), request=request) from exc
        except asyncio.CancelledError:
            connection.close()
            raise
        return httpx.Response(status, headers=headers, stream=body, extensions={BODY: body})


class ArrivingBody(httpx.AsyncByteStream):
    """The body of one response. `listen` is the fast way to it; iterating works too."""

    def __init__(self, connection: "_Connection") -> None:
        loop = asyncio.get_running_loop()
        self.head: asyncio.Future[tuple[int, list[tuple[bytes, bytes]]]] = loop.create_future()
        self._end: asyncio.Future[None] = loop.create_future()
        self._connection = connection
        self._reader: BodyReader | None = None
        self._head_bytes = b""
        self._sink: Sink | None = None
        self._early: list[tuple[float, bytes]] = []
        self._keeps_alive = True
        self.is_ended = False

    def listen(self, sink: Sink) -> None:
        """Hand every piece to `sink`, those that are here already first."""
        early, self._early = self._early, []
        for at_s, piece in early:
            sink(at_s, piece)
        self._sink = sink

    async def finished(self) -> None:
        """Return when the body is complete. Errors: httpx.RemoteProtocolError when it never will be."""
        try:
            await self._end
        except ProtocolFault as exc:
            raise httpx.RemoteProtocolError(str(exc)) from exc

    async def __aiter__(self) -> AsyncIterator[bytes]:
        pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.listen(lambda _at_s, piece: pieces.put_nowait(piece))
        self._end.add_done_callback(lambda _end: pieces.put_nowait(None))
        while (piece := await pieces.get()) is not None:
            yield piece
        await self.finished()

    async def aclose(self) -> None:
        """Give up what has not arrived: the connection is closed unless the body is complete."""
        if not self.is_ended:
            self._connection.close()

    def feed(self, at_s: float, received: bytes) -> None:
        """Take bytes from the socket. Errors: ProtocolFault."""
        if self._reader is None:
            received = self._read_head(received)
            if self._reader is None:
                return
        piece = self._reader.feed(received)
        if piece:
            if self._sink is None:
                self._early.append((at_s, piece))
            else:
                self._sink(at_s, piece)
        if self._reader.is_complete:
            self._finish()

    def fail(self, reason: str) -> None:
        """The connection is gone. Without one byte received it was stale; without a length this is the end."""
        if self.is_ended:
            return
        if self._reader is not None and self._reader.ends_with_connection:
            self._keeps_alive = False
            self._finish()
            return
        self.is_ended = True
        fault = ProtocolFault(reason)
        if not self.head.done():
            self.head.set_exception(fault if self._head_bytes else _StaleConnectionError(reason))
            self._end.cancel()
        elif not self._end.done():
            self._end.set_exception(fault)
            self._end.exception()  # mark it as seen: nobody may be waiting any more

    def _finish(self) -> None:
        self.is_ended = True
        if not self._end.done():
            self._end.set_result(None)
        self._connection.release(keep_alive=self._keeps_alive)

    def _read_head(self, received: bytes) -> bytes:
        """Parse the head when it is complete; return what follows it."""
        self._head_bytes += received
        while True:
            end = self._head_bytes.find(b"\r\n\r\n")
            if end < 0:
                if len(self._head_bytes) > _MAX_HEAD_BYTES:
                    raise ProtocolFault("the head of the response is too long")
                return b""
            status, headers = _parse_head(self._head_bytes[:end])
            rest = self._head_bytes[end + 4 :]
            if status >= 200:
                break
            self._head_bytes = rest  # an interim answer: the real one follows
        self._reader, self._keeps_alive = body_reader(status, headers)
        if not self.head.done():
            self.head.set_result((status, headers))
        return rest


class _StaleConnectionError(Exception):
    """The connection closed before the first byte of the answer."""


class _Connection(asyncio.Protocol):
    """One connection with at most one response in flight."""

    def __init__(self, clock: Clock, open_connections: "set[_Connection]", idle: "list[_Connection]") -> None:
        self._now_s = clock.now_s
        self._open = open_connections
        self._idle = idle
        self._transport: asyncio.Transport | None = None
        self._body: ArrivingBody | None = None
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True
        self._open.add(self)

    def send(self, message: bytes) -> ArrivingBody:
        assert self._transport is not None
        self._body = ArrivingBody(self)
        self._transport.write(message)
        return self._body

    def data_received(self, data: bytes) -> None:
        at_s = self._now_s()
        if self._body is None:
            self.close()  # the server speaks unasked
            return
        try:
            self._body.feed(at_s, data)
        except ProtocolFault as exc:
            self._body.fail(str(exc))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._open.discard(self)
        if self._body is not None:
            reason = f": {exc.strerror or exc}" if isinstance(exc, OSError) else ""
            self._body.fail(f"the server closed the connection in mid-response{reason}")
            self._body = None

    def release(self, *, keep_alive: bool) -> None:
        """The response is complete."""
        self._body = None
        if keep_alive and self.is_open:
            self._idle.append(self)
        else:
            self.close()

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()


def _head_bytes(request: httpx.Request) -> bytes:
    lines = [request.method.encode("ascii") + b" " + request.url.raw_path + b" HTTP/1.1"]
    lines += [name + b": " + value for name, value in request.headers.raw]
    return b"\r\n".join([*lines, b"", b""])


def _parse_head(head: bytes) -> tuple[int, list[tuple[bytes, bytes]]]:
    first, *lines = head.split(b"\r\n")
    version, _, rest = first.partition(b" ")
    code = rest[:3]
    if not version.startswith(b"HTTP/1.") or not code.isdigit():
        raise ProtocolFault("the server does not speak HTTP/1.1")
    headers = [(b"x-http-version", version)] if version == b"HTTP/1.0" else []
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon:
            raise ProtocolFault("the head of the response is malformed")
        headers.append((name.strip(), value.strip()))
    return int(code), headers
