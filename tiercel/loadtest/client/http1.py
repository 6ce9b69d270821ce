"""HTTP/1.1 as an httpx transport that stamps every piece of a response in the event loop's read callback.

The transport of httpx takes about 100 us of CPU time for each chunk between the socket and the caller's `async for`,
too much for a stream of tokens.
"""

import asyncio
import contextlib
import ssl
from collections import defaultdict

import httpx

from tiercel.loadtest.client.connection import Connection, ProtocolFault, StaleConnectionError
from tiercel.values.clock import Clock

BODY = "tiercel_body"
"""Extension of a response: its `ArrivingBody`; httpx wraps the stream itself."""

SENT_S = "tiercel_sent_s"
"""Extension of a request: when the transport took it, before a connection was opened for it."""

_Origin = tuple[str, str, int]


class Http1Transport(httpx.AsyncBaseTransport):
    """Keep-alive connections, one for each request in flight, without a limit."""

    def __init__(self, clock: Clock, *, connect_s: float, verify: ssl.SSLContext) -> None:
        self._clock = clock
        self._connect_s = connect_s
        self._verify = verify
        self._idle: defaultdict[_Origin, list[Connection]] = defaultdict(list)
        self._open: set[Connection] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and return its response when the head has arrived; its extension BODY is the body."""
        request.extensions[SENT_S] = self._clock.now_s()
        message = _head_bytes(request) + await request.aread()
        url = request.url
        origin = (url.scheme, url.host, url.port or (443 if url.scheme == "https" else 80))
        while (connection := self._take_idle(origin)) is not None:
            with contextlib.suppress(StaleConnectionError):
                return await self._exchange(connection, message, request, is_reused=True)
        connection = await self._connect(origin, request)
        return await self._exchange(connection, message, request, is_reused=False)

    async def aclose(self) -> None:
        """Close every connection."""
        for connection in tuple(self._open):
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # the sockets close in the loop's next turn

    def _take_idle(self, origin: _Origin) -> Connection | None:
        idle = self._idle[origin]
        while idle:
            connection = idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self, origin: _Origin, request: httpx.Request) -> Connection:
        scheme, host, port = origin
        loop = asyncio.get_running_loop()
        context = self._verify if scheme == "https" else None
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(self._clock.now_s, self._open, self._idle[origin]), host, port, ssl=context
                )
        except TimeoutError as exc:
            raise httpx.ConnectTimeout(f"no connection within {self._connect_s:g} s", request=request) from exc
        except OSError as exc:
            raise httpx.ConnectError(exc.strerror or str(exc), request=request) from exc
        return connection

    async def _exchange(
        self, connection: Connection, message: bytes, request: httpx.Request, *, is_reused: bool
    ) -> httpx.Response:
        body = connection.send(message)
        try:
            status, headers = await body.head
        except StaleConnectionError as exc:
            if is_reused:
                raise
            raise httpx.RemoteProtocolError("the server closed the connection without a response") from exc
        except ProtocolFault as exc:
            raise httpx.RemoteProtocolError(str(exc), request=request) from exc
        except asyncio.CancelledError:
            connection.close()
            raise
        return httpx.Response(status, headers=headers, stream=body, extensions={BODY: body})


def _head_bytes(request: httpx.Request) -> bytes:
    lines = [request.method.encode("ascii") + b" " + request.url.raw_path + b" HTTP/1.1"]
    lines += [name + b": " + value for name, value in request.headers.raw]
    return b"\r\n".join([*lines, b"", b""])
