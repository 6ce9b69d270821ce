"""The body of a response, written straight into its connection.

The `send` of ASGI runs one coroutine per layer of the application for each chunk. A stream has a chunk per step.
"""

import asyncio
from collections.abc import MutableMapping
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_EXTENSION = "tiercel.body"


class BodyWriter:
    """Writes chunks of one response whose start has been sent. Its last chunk is sent by ASGI's `send`.

    What is written in one turn of the event loop is sent after it: the chunks of all responses of a step leave
    together, when the work on the step is done.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._unsent: list[bytes] = []

    @property
    def is_ready(self) -> bool:
        """False while the client does not read what was written, and if chunks cannot be written this way.

        ASGI's `send` waits for the client in that case.
        """
        cycle = self._cycle
        return cycle.chunked_encoding is True and not (cycle.flow.write_paused or cycle.response_complete)

    def write(self, chunk: bytes) -> None:
        """Write a chunk that is not empty; drop it if the client has gone."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self.flush)
        self._unsent.append(chunk)

    def flush(self) -> None:
        """Send what was written; to be called before ASGI's `send`."""
        if not self._unsent:
            return
        chunk = b"".join(self._unsent)
        self._unsent.clear()
        if not self._cycle.disconnected:
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))


class BodyWritingProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which adds a `BodyWriter` to the scope of each request."""

    def on_headers_complete(self) -> None:
        """Begin a request. Called by the parser."""
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            extensions = cast(dict[str, object], self.scope).setdefault("extensions", {})
            cast(dict[str, object], extensions)[_EXTENSION] = BodyWriter(self.cycle)


def body_writer(scope: MutableMapping[str, Any]) -> BodyWriter | None:  # Any: ASGI's scope
    """Return the writer of a request, or None if its protocol has none."""
    return cast(BodyWriter | None, scope.get("extensions", {}).get(_EXTENSION))
