"""The connection to the engine: frames over one Unix socket."""

import asyncio
import socket
from collections.abc import Callable
from typing import cast

import structlog

from tiercel.values.errors import WireError
from tiercel.wire.frames import FrameReader, FromEngine, ToEngine, encode_frame


class EngineConnection(asyncio.Protocol):
    """Decodes frames from the engine and encodes those to it. Runs on one event loop.

    `on_message` gets every message. `on_lost` is called when the socket has closed, and when the engine has sent
    bytes that are no frame.
    """

    def __init__(self, on_message: Callable[[FromEngine], None], on_lost: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._reader: FrameReader[FromEngine] = FrameReader(cast(type[FromEngine], FromEngine))
        self._transport: asyncio.Transport | None = None
        self._log = structlog.stdlib.get_logger("server.engine")

    async def open(self, sock: socket.socket) -> None:
        """Take over a connected socket."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=sock)

    def send(self, message: ToEngine) -> None:
        """Send one message; drop it if the connection is closed."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(message))

    def close(self) -> None:
        """Close the socket; the engine exits when it reads the end of it."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            messages = self._reader.feed(data)
        except WireError as error:
            self._log.error("engine_frame_unreadable", error=str(error))
            self._on_lost()
            self.close()
            return
        for message in messages:
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_lost()
