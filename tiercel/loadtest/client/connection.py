"""One HTTP/1.1 connection: httptools parses the response, and every piece of it is stamped when it arrives."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import httptools
import httpx

Sink = Callable[[float, bytes], None]
"""Takes the time of arrival and a piece of the body."""

Head = tuple[int, list[tuple[bytes, bytes]]]
"""Status and headers of a response."""

_MAX_HEAD_BYTES = 256 * 1024


class ProtocolFault(Exception):
    """The server violated HTTP/1.1, or the connection broke. The message is one line."""


class StaleConnectionError(Exception):
    """The server closed the connection before the first byte of its response."""


class _Closable(Protocol):
    def close(self) -> None: ...


class ArrivingBody(httpx.AsyncByteStream):
    """The body of one response. `listen` hands the pieces on without delay; iterating works, too."""

    def __init__(self, connection: _Closable) -> None:
        loop = asyncio.get_running_loop()
        self.head: asyncio.Future[Head] = loop.create_future()
        self.is_ended = False
        self._end: asyncio.Future[None] = loop.create_future()
        self._connection = connection
        self._sink: Sink | None = None
        self._early: list[tuple[float, bytes]] = []  # pieces that arrived before `listen`

    def listen(self, sink: Sink) -> None:
        """Hand every piece to `sink`, first the pieces that have arrived already."""
        early, self._early = self._early, []
        for at_s, piece in early:
            sink(at_s, piece)
        self._sink = sink

    async def finished(self) -> None:
        """Return when the body is complete. Errors: httpx.RemoteProtocolError if it ends before that."""
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
        """Close the connection, unless the body is complete and the connection can be used again."""
        if not self.is_ended:
            self._connection.close()

    def take(self, at_s: float, piece: bytes) -> None:
        """Hand one piece on."""
        if self._sink is None:
            self._early.append((at_s, piece))
        else:
            self._sink(at_s, piece)

    def finish(self) -> None:
        """The body is complete."""
        self.is_ended = True
        if not self._end.done():
            self._end.set_result(None)

    def fail(self, error: Exception) -> None:
        """The response cannot be completed."""
        if self.is_ended:
            return
        self.is_ended = True
        if not self.head.done():
            self.head.set_exception(error)
            self._end.cancel()
        elif not self._end.done():
            self._end.set_exception(error)
            self._end.exception()  # mark the exception as retrieved: the caller may have given up


class Connection(asyncio.Protocol):
    """A connection with at most one response in flight. Its `on_...` methods are called by the parser."""

    def __init__(
        self, now_s: Callable[[], float], open_connections: "set[Connection]", idle: "list[Connection]"
    ) -> None:
        self.is_open = False
        self._now_s = now_s
        self._open = open_connections
        self._idle = idle
        self._transport: asyncio.Transport | None = None
        self._body: ArrivingBody | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0  # received of the response in flight until its head is complete
        self._has_head = False
        self._ends_with_connection = False  # the body has no length of its own
        self._is_complete = False
        self._keeps_alive = False
        self._has_surplus = False  # bytes have followed the response
        self._pieces: list[bytes] = []  # of the data that is being parsed
        self._num_body_pieces = 0  # the rest belongs to a second response
        self.on_body = self._pieces.append  # no Python function for each chunk
        self._parser = httptools.HttpResponseParser(self)
        # Any server is to be measured, also one that is not strict. None of this is a risk to a client on its own.
        self._parser.set_dangerous_leniencies(
            lenient_headers=True, lenient_chunked_length=True, lenient_transfer_encoding=True,
            lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True,
        )  # fmt: skip

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True
        self._open.add(self)

    def send(self, message: bytes) -> ArrivingBody:
        """Send a request and return the body of its response."""
        assert self._transport is not None
        self._body = ArrivingBody(self)
        self._head_bytes, self._has_head, self._is_complete = 0, False, False
        self._transport.write(message)
        return self._body

    def data_received(self, data: bytes) -> None:
        at_s = self._now_s()
        body = self._body
        if body is None:
            self.close()  # no response is due
            return
        if not self._has_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._break_off(body, "the server switched to another protocol")
            return
        except httptools.HttpParserError as exc:
            if not self._is_complete:
                self._break_off(body, f"the response is not valid HTTP/1.1: {exc}")
                return
            self._has_surplus = True
        if not self._has_head and self._head_bytes > _MAX_HEAD_BYTES:
            self._break_off(body, f"the head of the response is longer than {_MAX_HEAD_BYTES} bytes")
            return
        if self._has_surplus:
            del self._pieces[self._num_body_pieces :]
        if self._pieces:
            piece = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces.clear()
            body.take(at_s, piece)
        if self._is_complete:
            self._finish(body)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._open.discard(self)
        body, self._body = self._body, None
        if body is None:
            return
        if self._has_head and self._ends_with_connection:
            body.finish()
        elif not self._head_bytes:
            body.fail(StaleConnectionError())
        else:
            reason = f": {exc.strerror or exc}" if isinstance(exc, OSError) else ""
            body.fail(ProtocolFault(f"the server closed the connection in mid-response{reason}"))

    def close(self) -> None:
        """Close at once."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def on_message_begin(self) -> None:
        self._has_surplus = self._is_complete
        self._headers = []  # the trailers of the response before

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        headers, self._headers = self._headers, []
        status = self._parser.get_status_code()
        if status < 200 or self._has_surplus or self._body is None:
            return  # an interim response: the final one follows
        self._has_head = True
        self._ends_with_connection = _ends_with_connection(headers)
        if not self._body.head.done():
            self._body.head.set_result((status, headers))

    def on_message_complete(self) -> None:
        if self._is_complete:
            return  # a second response
        self._is_complete = self._has_head
        self._num_body_pieces = len(self._pieces)
        self._keeps_alive = self._parser.should_keep_alive()  # known inside this callback only

    def _finish(self, body: ArrivingBody) -> None:
        self._body = None
        body.finish()
        if self._keeps_alive and not self._has_surplus and self.is_open:
            self._idle.append(self)
        else:
            self.close()

    def _break_off(self, body: ArrivingBody, reason: str) -> None:
        body.fail(ProtocolFault(reason))
        self.close()


def _ends_with_connection(headers: list[tuple[bytes, bytes]]) -> bool:
    """Return whether a body has no length of its own. Source: RFC 9112, section 6.3."""
    codings = [value.lower() for name, value in headers if name.lower() == b"transfer-encoding"]
    if codings:
        return not codings[-1].endswith(b"chunked")
    return all(name.lower() != b"content-length" for name, _ in headers)
