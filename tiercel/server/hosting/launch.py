"""`tiercel engine`: host an engine for fronts, from settings to an exit code."""

import asyncio
import contextlib
import errno
import secrets
import signal
import socket
import ssl
from collections.abc import Sequence
from typing import TextIO

import structlog

from tiercel.server.client.child import engine_command
from tiercel.server.client.inherited import InheritedResources
from tiercel.server.client.status import EngineState
from tiercel.server.client.supervisor import Supervisor
from tiercel.server.client.wire_access import host_tls, read_secret
from tiercel.server.hosting.front_session import HELLO_S, FrontSession
from tiercel.server.hosting.hosted_engine import HostedEngine
from tiercel.settings.engine_address import EngineAddress
from tiercel.settings.settings import Settings
from tiercel.system.log import configure_log
from tiercel.system.port_holder import ways_out
from tiercel.system.standard_streams import error_stream, guard_streams, output_stream, say
from tiercel.values.clock import Clock, MonotonicClock
from tiercel.values.errors import ConfigError
from tiercel.wire.handshake import IDENTITY_BYTES

EXIT_OK = 0
EXIT_FORCED = 1
EXIT_CONFIG = 2
EXIT_ENGINE = 3

_STALL_S = 30.0  # without the end of a step, while the engine has not said how long a step may take
_ENGINE_PATIENCE_S = 2.0  # to wait for the exit of the engine after `Quit`
_PERSIST_S = 5.0  # at least, for the engine to write to the SSD tier what the drain has left unfinished
_BACKLOG = 128
_SHUTDOWN_S = 2.0  # for a peer to close its side of TLS
_POLL_S = 0.02


def host_engine(
    settings: Settings,
    listen: EngineAddress,
    *,
    command: Sequence[str] | None = None,
    out: TextIO | None = None,
    err: TextIO | None = None,
) -> int:
    """Host an engine until a signal or the engine's end; return the exit code.

    0 after a clean drain, 1 if a second signal cut the drain short, 2 if the settings or the model are wrong, 3 if no
    engine can be kept alive. `command` starts another engine, for tests and benchmarks.
    """
    guard_streams()
    configure_log(settings.server.log_level, as_json=settings.server.log_format == "json")
    try:
        with contextlib.ExitStack() as resources:
            secret, tls = read_secret(settings.server), host_tls(settings.server, listen.host)
            inherited = resources.enter_context(InheritedResources.open(settings.engine))
            sock = resources.enter_context(_bind(listen))
            supervisor = resources.enter_context(Supervisor(command or engine_command(), inherited))
            host = EngineHost(settings, sock, secret, tls, supervisor, out or output_stream(), err or error_stream())
            return asyncio.run(host.run())
    except ConfigError as exc:
        say(f"tiercel: {exc.message}", err or error_stream())
        return EXIT_CONFIG


class EngineHost:
    """The listener, the engine process and the signals, from start to exit code.

    The listening socket and the memory of the host tier belong to this process, so that fronts stay connected and
    blocks are kept while an engine that has died is replaced.
    """

    def __init__(
        self,
        settings: Settings,
        sock: socket.socket,
        secret: bytes,
        tls: ssl.SSLContext | None,
        supervisor: Supervisor,
        out: TextIO,
        err: TextIO,
        clock: Clock | None = None,
    ) -> None:
        self._settings = settings
        self._sock = sock
        self._tls = tls
        self._supervisor = supervisor
        self._out = out
        self._err = err
        self._clock = clock or MonotonicClock()
        self._engine = HostedEngine(self._clock, self._on_state)
        self._engine.status.stall_limit_s = lambda: (
            settings.server.stall_timeout_s or supervisor.stall_limit_s or _STALL_S
        )
        self._asked = asyncio.Event()
        self._asked_twice = asyncio.Event()
        self._num_connections = 0
        self._log = structlog.stdlib.get_logger("server.host")
        self._has_said = False
        self.secret = secret
        self.identity = secrets.token_bytes(IDENTITY_BYTES)
        self.num_strangers = 0

    def next_number(self) -> int:
        """Return the number of the next connection, from 1."""
        self._num_connections += 1
        return self._num_connections

    async def run(self) -> int:
        """Host the engine to its end; return the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        supervising = asyncio.create_task(
            self._supervisor.run(self._engine, self._settings.engine, self._clock, _Uncounted())
        )
        supervising.add_done_callback(lambda _: self._engine.give_up())
        server = await loop.create_server(
            lambda: FrontSession(self._engine, self, self._clock),
            sock=self._sock,
            ssl=self._tls,
            ssl_handshake_timeout=None if self._tls is None else HELLO_S,
            ssl_shutdown_timeout=None if self._tls is None else _SHUTDOWN_S,
        )
        asked = asyncio.create_task(self._asked.wait())
        ended = asyncio.create_task(self._engine.status.wait_gone())
        await asyncio.wait([asked, ended], return_when=asyncio.FIRST_COMPLETED)
        server.close()
        code = await self._drain(ended) if asked.done() and not ended.done() else self._engine_ended()
        for task in (asked, ended):
            task.cancel()
        await asyncio.gather(supervising, return_exceptions=True)
        return code

    async def _drain(self, ended: "asyncio.Task[None]") -> int:
        """Let sequences end until the limit, then the engine persist its cache. Fronts move what is left."""
        engine, patience_s = self._engine, self._settings.server.shutdown_timeout_s
        self._log.info("draining", open=engine.num_open, timeout_s=patience_s)
        engine.leave()
        end_s = self._clock.now_s() + patience_s
        idle, asked_twice = (asyncio.create_task(wait) for wait in (self._wait_idle(), self._asked_twice.wait()))
        await asyncio.wait([idle, asked_twice, ended], timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        self._supervisor.stop()
        if not self._asked_twice.is_set():
            persist_s = max(_PERSIST_S, end_s - self._clock.now_s())
            engine.quit(persist_s)
            limit_s = persist_s + _ENGINE_PATIENCE_S
            await asyncio.wait([ended, asked_twice], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        asked_twice.cancel()
        engine.disconnect()
        is_forced = self._asked_twice.is_set()
        await self._supervisor.leave(0.0 if is_forced else _ENGINE_PATIENCE_S)
        return EXIT_FORCED if is_forced else EXIT_OK

    async def _wait_idle(self) -> None:
        """Return when every sequence has ended."""
        while self._engine.num_open:  # noqa: ASYNC110 - a counter
            await asyncio.sleep(_POLL_S)

    def _engine_ended(self) -> int:
        status = self._engine.status
        if status.state is EngineState.FAILED and status.failure is not None:
            say(f"tiercel: {status.failure.message}", self._err)
            return EXIT_CONFIG
        say(f"tiercel: {self._supervisor.end or 'no engine can be started'}", self._err)
        return EXIT_ENGINE

    def _on_state(self) -> None:
        """Announce the first engine that is ready."""
        if self._engine.status.state is EngineState.READY and not self._has_said:
            self._has_said = True
            host, port = self._sock.getsockname()[:2]
            name = self._settings.server.served_model_names[0]
            self._log.info("ready", host=host, port=port, model=name, tls=self._tls is not None)
            say(f"tiercel engine serves {name} at {EngineAddress(host, port)}", self._out)

    def _on_signal(self) -> None:
        (self._asked_twice if self._asked.is_set() else self._asked).set()

    def _on_hangup(self) -> None:
        self._log.warning("hangup ignored: an engine reads its settings at its start, and tenants come from the fronts")


class _Uncounted:
    """Counts no deaths: the fronts do, and the log has them."""

    def on_engine_death(self, kind: str) -> None:
        """Do nothing."""


def _bind(listen: EngineAddress) -> socket.socket:
    """Listen now, so that fronts queue while the engine loads. Errors: ConfigError."""
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((listen.host, listen.port))
        sock.listen(_BACKLOG)
    except OSError as exc:
        sock.close()
        way = f"; {ways_out(listen.port, '--listen')}" if exc.errno == errno.EADDRINUSE else ""
        raise ConfigError("wire.listen", f"--listen {listen}: {exc.strerror or exc}{way}") from exc
    return sock
