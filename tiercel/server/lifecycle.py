"""Run the daemon: load, serve and reload, until it leaves."""

import asyncio
import signal
import socket
from typing import TextIO, cast

import structlog

from tiercel.server.api.context import ServerContext
from tiercel.server.app import create_app
from tiercel.server.client.client import EngineClient
from tiercel.server.client.status import EngineState
from tiercel.server.client.supervisor import Supervision
from tiercel.server.control.handover import Handover
from tiercel.server.control.memory import MemoryTrimmer
from tiercel.server.control.messages import ADMIN, HTTP
from tiercel.server.control.predecessor import Predecessor
from tiercel.server.control.systemd import SystemdNotifier
from tiercel.server.http.admin_listener import AdminListener
from tiercel.server.http.listen import url_of
from tiercel.server.http.reaper import Reaper, UvicornConnection
from tiercel.server.http.uvicorn_server import QuietServer, uvicorn_config
from tiercel.server.leaving import EXIT_CONFIG, EXIT_ENGINE, EXIT_OK, Departure
from tiercel.server.ui.past import ServerPast
from tiercel.settings.config import notify_socket, watchdog_s
from tiercel.settings.settings import ServerSettings, Settings
from tiercel.system.standard_streams import say
from tiercel.values.errors import ConfigError

_POLL_S = 0.02
_TRACES_S = 2.0  # to send the traces of the last requests
_MAX_RELOADS = 2  # a running and a queued one


class Daemon:
    """The HTTP server, the engine process and the signals, from start to exit code."""

    def __init__(
        self,
        settings: Settings,
        context: ServerContext,
        sock: socket.socket,
        supervisor: Supervision,
        out: TextIO,
        err: TextIO,
        admin_sock: socket.socket | None = None,
        predecessor: Predecessor | None = None,
    ) -> None:
        """`predecessor`: the daemon that serves on the sockets until this one is ready."""
        self._settings = settings
        self._context = context
        self._sock = sock
        self._sock_by_name = {HTTP: sock} if admin_sock is None else {HTTP: sock, ADMIN: admin_sock}
        self._supervisor = supervisor
        self._predecessor = predecessor
        admin = None if admin_sock is None else AdminListener(admin_sock)
        self._past = ServerPast(context)
        app = self._app = create_app(context, admin, self._past)
        self._server = QuietServer(
            uvicorn_config(app, settings.server, context.metrics.on_refused), settings.server.timeout_headers_s
        )
        self._notifier = SystemdNotifier(notify_socket(), context.clock)
        self._departure = Departure(context, supervisor, self._server, self._notifier)
        self._handover = Handover(
            context.client.status,
            self._sock_by_name,
            lambda: supervisor.give_up_disk(context.client),
            self._begin_drain,
            self._server.stop_accepting,
        )
        self._out = out
        self._err = err
        self._reloads: set[asyncio.Task[None]] = set()
        self._status = ""  # for the service manager; empty until the engine is ready
        self._log = structlog.stdlib.get_logger("server.lifecycle")

    async def run(self) -> int:
        """Run the daemon to its end; return the exit code."""
        url = url_of(self._settings.server, self._sock)
        server = self._server
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        if self._context.traces is not None:
            self._context.traces.open()
        if self._supervisor.pid is not None:
            self._context.metrics.watch_engine(lambda: self._supervisor.pid or 0)
        try:
            supervising = self._start_engine()
            if self._context.batches is not None:
                self._context.batches.start(self._app)
            serving = asyncio.create_task(self._serve())
            if self._predecessor is None:
                self._handover.listen(self._settings.server)
            limits = self._settings.server
            reaper = Reaper(self._context.clock, 2 * max(limits.timeout_headers_s, limits.timeout_keep_alive_s))
            reaping = asyncio.create_task(reaper.run(cast("set[UvicornConnection]", server.server_state.connections)))
            trimming = asyncio.create_task(MemoryTrimmer().run())
            recording = asyncio.create_task(self._past.run())
            watching = self._start_watching()
            code = await self._serve_until_end(url, serving)
            for task in (reaping, trimming, recording, *watching):
                task.cancel()
            server.should_exit = True
            server.force_exit = self._departure.is_forced
            await serving
            code = await self._departure.stop_engine(code)
            self._handover.close()
            await asyncio.gather(supervising, return_exceptions=True)
            return code
        finally:
            if self._context.batches is not None:
                await self._context.batches.stop()
            if self._context.traces is not None:
                await asyncio.to_thread(self._context.traces.close, _TRACES_S)
            self._context.close()

    async def _serve(self) -> None:
        """Accept connections: at once, or when the engine is ready if another daemon accepts them until then."""
        status = self._context.client.status
        if self._predecessor is not None:
            await status.wait_until(lambda: status.ready is not None or status.is_over or self._departure.is_requested)
            if status.ready is None:
                return
        await self._server.serve(sockets=list(self._sock_by_name.values()))

    async def _take_over(self, serving: "asyncio.Task[None]") -> None:
        """Once this daemon accepts connections, have the one before leave."""
        if self._predecessor is not None:
            while not (self._server.started or serving.done()):  # noqa: ASYNC110 - a flag of uvicorn
                await asyncio.sleep(_POLL_S)
            await asyncio.to_thread(self._predecessor.confirm)
            self._handover.listen(self._settings.server)

    def _start_engine(self) -> "asyncio.Task[None]":
        """Start to supervise the engine. The client gives up if the supervisor cannot go on."""
        context = self._context
        supervising = asyncio.create_task(
            self._supervisor.run(context.client, self._settings.engine, context.clock, context.metrics)
        )

        def on_end(task: "asyncio.Task[None]") -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._log.error("supervision_ended", error=str(error))
            context.client.give_up()

        supervising.add_done_callback(on_end)
        return supervising

    def _start_watching(self) -> list["asyncio.Task[None]"]:
        """Ping the watchdog of the service manager, if one is configured, while the engine is not stalled."""
        silence_s, status = watchdog_s(), self._context.client.status
        if silence_s is None:
            return []
        return [asyncio.create_task(self._notifier.watch(silence_s, lambda: not status.is_stalled))]

    def _begin_drain(self) -> float:
        if not self._departure.is_requested:
            self._on_signal()
        return self._context.settings.shutdown_timeout_s

    def _on_signal(self) -> None:
        self._handover.is_draining = True
        self._departure.request()

    def _on_hangup(self) -> None:
        """Reload the settings and the tenants, unless a reload is queued already."""
        if not self._departure.is_requested and len(self._reloads) < _MAX_RELOADS:
            reload = asyncio.ensure_future(self._reload())
            self._reloads.add(reload)
            reload.add_done_callback(self._reloads.discard)

    async def _reload(self) -> None:
        """Apply the settings file and the tenants file. `Configuration` logs and counts refused reloads."""
        if self._status:
            self._notifier.reloading()
        status = self._status
        try:
            await self._context.configuration.reload(self._context.tenants)
        except ConfigError as exc:
            status = f"{status}; the last reload was refused: {exc.message}"
        finally:
            if self._status:
                self._notifier.ready(status)

    async def _serve_until_end(self, url: str, serving: "asyncio.Task[None]") -> int:
        """Load, serve and drain. Return the exit code after all streams have ended.

        Errors: those of the HTTP server.
        """
        client = self._context.client
        stop_requested = asyncio.create_task(self._departure.requested.wait())
        engine_ended = asyncio.create_task(client.status.wait_gone())
        loaded = asyncio.create_task(client.status.wait_ready())
        taken_over = asyncio.create_task(self._handover.confirmed.wait())
        try:
            await asyncio.wait([stop_requested, engine_ended, loaded, serving], return_when=asyncio.FIRST_COMPLETED)
            if not stop_requested.done() and client.status.state is EngineState.READY:
                await self._take_over(serving)
                self._announce(url)
                await asyncio.wait(
                    [stop_requested, engine_ended, serving, taken_over], return_when=asyncio.FIRST_COMPLETED
                )
            if serving.done():
                serving.result()
            if taken_over.done() and not stop_requested.done() and not engine_ended.done():
                return await self._departure.leave(stop_requested, engine_ended)
            if not stop_requested.done():
                return self._engine_ended(client)
            if client.status.state is EngineState.LOADING:
                return self._give_up_loading(client)
            return await self._departure.drain(engine_ended, self._context.settings.shutdown_timeout_s)
        finally:
            tasks = (stop_requested, engine_ended, loaded, taken_over)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _engine_ended(self, client: EngineClient) -> int:
        self._context.admission.close()
        if client.status.state is EngineState.FAILED and client.status.failure is not None:
            say(f"tiercel: {client.status.failure.message}", self._err)
            return EXIT_CONFIG
        say(f"tiercel: {self._supervisor.end or 'no engine can be started'}", self._err)
        return EXIT_ENGINE

    def _give_up_loading(self, client: EngineClient) -> int:
        """Stop before the model is loaded; there is nothing to drain."""
        self._context.admission.close()
        self._supervisor.stop()  # the end of the engine is no death
        client.close()  # requests that wait for the model get an error
        return EXIT_OK

    def _announce(self, url: str) -> None:
        """Announce to the service manager, in the log and on stdout that the engine is ready."""
        ready, settings = self._context.client.status.ready, self._settings.server
        if ready is None:
            return
        name = settings.served_model_names[0]
        self._status = f"serving {name} at {url}"
        self._notifier.ready(self._status)
        admin_sock = self._sock_by_name.get(ADMIN)
        admin = {} if admin_sock is None else {"admin_url": url_of(settings, admin_sock)}
        load_s, engine_pid = round(ready.load_s, 2), self._supervisor.pid
        self._log.info("ready", url=url, **admin, model=name, load_s=load_s, engine_pid=engine_pid)
        if (size := self._context.codec.vocabulary.size) > ready.vocab_size:  # prompts with the others are refused
            self._log.warning("tokenizer_larger_than_model", tokens=size, model_tokens=ready.vocab_size)
        greeting = _greeting(url, name, settings, has_chat=self._context.template is not None)
        more = "".join(f"\n  /admin, /metrics and /ui: {address}" for address in admin.values())
        page = next(iter(admin.values()), url)
        more += f"\n  dashboard: {page}/ui" if page.startswith("http") else ""
        say(f"{greeting}{more}", self._out)


def _greeting(url: str, name: str, settings: ServerSettings, *, has_chat: bool) -> str:
    path, field = ("chat/completions", '"messages": [{"role": "user", "content": "Hello"}]')
    if not has_chat:
        path, field = ("completions", '"prompt": "Hello"')
    has_keys = settings.api_keys or settings.tenants_config is not None
    key = ' -H "Authorization: Bearer $TIERCEL_API_KEY"' if has_keys else ""
    where = f"--unix-socket {settings.uds} http://localhost" if settings.uds is not None else url
    return (
        f"tiercel serves {name} at {url}\n"
        f"  curl {where}/v1/{path}{key} -H 'Content-Type: application/json' \\\n"
        f'    -d \'{{"model": "{name}", {field}}}\''
    )
