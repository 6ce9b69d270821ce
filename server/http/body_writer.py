"""The body of a response, written straight into its connection.

The `send` of ASGI runs one coroutine per layer of the application for each chunk. A stream has a chunk per step.
"""

import asyncio
import functools
from collections.abc import MutableMapping
from typing import Any, cast

from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

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
        for writer in writers:
            writer.flush()


class BodyWriter:
    """Writes chunks of one response whose start has been sent. Its last chunk is sent by ASGI's `send`."""

    __slots__ = ("_burst", "_cycle", "_unsent")

    def __init__(self, cycle: RequestResponseCycle, burst: WriteBurst) -> None:
        self._cycle = cycle
        self._burst = burst
        self._unsent = b""

    @property
    def is_ready(self) -> bool:
        """False while the client does not read what was written, and if chunks cannot be written this way.

        ASGI's `send` waits for the client in that case.
        """
        cycle = self._cycle
        return cycle.chunked_encoding is True and not (cycle.flow.write_paused or cycle.response_complete)

    def write(self, chunk: bytes) -> None:
        """Write a chunk. It is sent with the burst, or dropped if the client has gone."""
        if not self._unsent:
            self._burst.add(self)
        self._unsent += chunk

    def flush(self) -> None:
        """Send what was written; to be called before ASGI's `send`."""
        chunk, self._unsent = self._unsent, b""
        cycle = self._cycle
        if chunk and not (cycle.disconnected or cycle.transport.is_closing()):
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))


class BodyWritingProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which adds a `BodyWriter` to the scope of each request."""

    def __init__(
        self,
        burst: WriteBurst,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],  # Any: as in uvicorn
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._burst = burst

    @staticmethod
    def factory() -> type[asyncio.Protocol]:
        """Return what uvicorn calls for each connection; the responses of all connections share one burst."""
        return cast(type[asyncio.Protocol], functools.partial(BodyWritingProtocol, WriteBurst()))

    def on_headers_complete(self) -> None:
        """Begin a request. Called by the parser."""
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            extensions = cast(dict[str, object], self.scope).setdefault("extensions", {})
            cast(dict[str, object], extensions)[_EXTENSION] = BodyWriter(self.cycle, self._burst)


def body_writer(scope: MutableMapping[str, Any]) -> BodyWriter | None:  # Any: ASGI's scope
    """Return the writer of a request, or None if its protocol has none."""
    return cast(BodyWriter | None, scope.get("extensions", {}).get(_EXTENSION))
