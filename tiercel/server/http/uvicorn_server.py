"""uvicorn, set up for a daemon that handles its signals itself."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Generator
from typing import cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tiercel.server.http.body_writer import BodyWritingProtocol
from tiercel.server.http.descriptors import max_connections
from tiercel.server.http.gate import ConnectionGate, ConnectionLimits
from tiercel.settings.settings import ServerSettings

FLUSH_S = 5.0  # how long the last bytes of cut streams may take
_CLOSE = (b"connection", b"close")
_CUT_STREAM = "ASGI callable returned without completing response."


class QuietServer(uvicorn.Server):
    """uvicorn without its signal handlers, which would raise the signal again after a drain.

    A TLS handshake has `handshake_s` seconds. asyncio would wait for 60 s, and uvicorn cannot set that.
    """

    def __init__(self, config: uvicorn.Config, handshake_s: float = 10.0) -> None:
        super().__init__(config)
        self._handshake_s = handshake_s
        self.servers = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections on these sockets, which listen already. Called by `serve`."""
        config = self.config
        for sock in sockets or ():
            server = await asyncio.get_running_loop().create_server(
                self._connection,
                sock=sock,
                ssl=config.ssl,
                backlog=config.backlog,
                ssl_handshake_timeout=None if config.ssl is None else self._handshake_s,
            )
            self.servers.append(server)
        self.started = True

    def _connection(self) -> asyncio.Protocol:
        make = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)  # a partial, see `factory`
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    def stop_accepting(self) -> None:
        """Close the listening sockets, which another process has too. Open connections are closed after an answer.

        A connection is never closed without an answer: its client may be sending a request. If it is idle, it is closed
        when its time is over, as always.
        """
        self.config.encoded_headers.append(_CLOSE)
        self.server_state.default_headers = [*self.server_state.default_headers, _CLOSE]
        for connection in self.server_state.connections:
            cycle = cast(RequestResponseCycle | None, cast(BodyWritingProtocol, connection).cycle)  # None: no request
            if cycle is not None and not cycle.response_started:
                cycle.keep_alive = False
        for server in self.servers:
            server.close()

    @property
    def num_connections(self) -> int:
        """Number of open connections."""
        return len(self.server_state.connections)


def uvicorn_config(app: ASGIApp, settings: ServerSettings, on_refusal: Callable[[int], None]) -> uvicorn.Config:
    """Return uvicorn's configuration for these settings; the listening socket is passed to `serve`.

    `on_refusal` gets the status of each request that is refused before the application sees it. Errors: ConfigError.
    """
    limits = ConnectionLimits(max_connections=max_connections(settings), header_timeout_s=settings.timeout_headers_s)
    return uvicorn.Config(
        app,
        http=BodyWritingProtocol.factory(ConnectionGate(limits, on_refusal=on_refusal)),
        log_config=None,
        log_level="warning",
        access_log=False,  # `request_done` is the one line of a request
        lifespan="off",
        ws="none",
        server_header=False,
        proxy_headers=False,  # `is_local` goes by the peer's real address
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
        timeout_keep_alive=max(int(settings.timeout_keep_alive_s), 1),
        timeout_graceful_shutdown=int(FLUSH_S),
    )


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes the event loop: uvloop's where it is installed."""
    return uvicorn.Config("", log_config=None).get_loop_factory()


def hide_cut_streams() -> None:
    """Drop uvicorn's error line about a stream that the server has cut; `request_done` has logged the reason."""
    logging.getLogger("uvicorn.error").addFilter(_is_not_cut_stream)


def _is_not_cut_stream(record: logging.LogRecord) -> bool:
    return record.msg != _CUT_STREAM
