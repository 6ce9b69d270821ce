"""`serve`: from settings to an exit code."""

import asyncio
import contextlib
import datetime
import functools
import gc
import logging
import secrets
import signal
import socket
import sys
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

import structlog
import uvicorn

from tiercel.clock import MonotonicClock
from tiercel.config import Resolved, notify_socket, watchdog_s
from tiercel.errors import ConfigError
from tiercel.exposure import check_exposure
from tiercel.log import configure_log, set_log_level
from tiercel.server.api.context import ServerContext
from tiercel.server.api.generation_config import load_sampling_defaults
from tiercel.server.app import create_app
from tiercel.server.control.configuration import Configuration, SettingsVersion
from tiercel.server.control.systemd import SystemdNotifier
from tiercel.server.engine.child import EngineChild, engine_command
from tiercel.server.engine.client import EngineClient
from tiercel.server.engine.inherited import InheritedResources
from tiercel.server.engine.mailbox import EngineGone
from tiercel.server.engine.status import EngineState
from tiercel.server.http.listen import bind, check_tls, url_of
from tiercel.server.http.reaper import Reaper
from tiercel.server.metrics.registry import ServerMetrics
from tiercel.server.metrics.tenants import oldest_waits
from tiercel.server.tenancy.admission import Admission, shutting_down
from tiercel.server.tenancy.directory import open_directory
from tiercel.server.tenancy.tenants import TenantTable
from tiercel.server.tenancy.usage import UsageBook
from tiercel.server.text.chat_template import ChatTemplate
from tiercel.server.text.tokenizer import load_text_codec
from tiercel.server.tracing.sink import make_traces
from tiercel.settings import EngineSettings, ServerSettings, Settings

EXIT_OK = 0
EXIT_FORCED = 1
EXIT_CONFIG = 2
EXIT_ENGINE = 3

_FLUSH_S = 5.0  # for the last bytes of streams that were cut
_ENGINE_PATIENCE_S = 2.0
_IDLE_S = 20.0  # for the head of a request
_CAUSE_S = 0.5  # between the end of the socket and the end of the process
_POLL_S = 0.02
_TRACES_S = 2.0  # for the traces of the last requests
_TEXT_WORKERS = 2
_MOST_RELOADS = 2  # one that runs and one that waits for its turn
_GC_THRESHOLDS = (20_000, 20, 50)  # one request makes thousands of objects, few of them cyclic garbage
_CUT_STREAM = "ASGI callable returned without completing response."


def serve(
    settings: Settings,
    *,
    origin: Resolved | None = None,
    command: Sequence[str] | None = None,
    out: TextIO | None = None,
    err: TextIO | None = None,
) -> int:
    """Serve until a signal or the engine's end; return the exit code.

    0 after a clean drain, 1 when a second signal cut it short, 2 when the settings or the model are wrong,
    3 when the engine died. `origin` is where the settings come from: it is asked again at a reload. `command` starts
    another engine (tests); `--fd N` and `--arena-fd N` are added to it.
    """
    complaints = err or sys.stderr
    configure_log(settings.server.log_level, settings.server.log_format)
    try:
        check_exposure(settings.server)
        check_tls(settings.server)
        inherited = InheritedResources.open(settings.engine)
        with contextlib.ExitStack() as undo:
            undo.callback(inherited.close)
            sock = bind(settings.server)
            undo.pop_all()
    except ConfigError as exc:
        print(f"tiercel: {exc.message}", file=complaints, flush=True)
        return EXIT_CONFIG
    with inherited, sock, EngineChild.start(command or engine_command(), inherited) as child:
        try:
            context = build_context(settings.server, settings.engine, origin)  # while the engine's imports run
        except ConfigError as exc:
            print(f"tiercel: {exc.message}", file=complaints, flush=True)
            return EXIT_CONFIG
        daemon = Daemon(settings, context, sock, child, out or sys.stdout, complaints)
        _settle_heap()
        logging.getLogger("uvicorn.error").addFilter(_is_worth_a_line)
        loop_factory = uvicorn.Config(create_app, log_config=None).get_loop_factory()
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(daemon.run())


def _settle_heap() -> None:
    """What lives from now on until the end is never looked at again by the garbage collector."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Not what uvicorn says of a stream that we cut: `request_done` has said why."""
    return record.msg != _CUT_STREAM


def build_context(
    settings: ServerSettings, engine: EngineSettings | None = None, origin: Resolved | None = None
) -> ServerContext:
    """Read the model's text side and put the parts together; starts nothing.

    `engine` are the settings of the engine behind it, and `origin` is where both come from: without it they stay as
    they are. Errors: ConfigError.
    """
    clock = MonotonicClock()
    folder = Path(settings.tokenizer or settings.model)
    codec = load_text_codec(folder, settings.chat_template)
    template = None
    if codec.chat_template is not None:
        template = ChatTemplate(codec.chat_template, codec, today=datetime.datetime.now)
    defaults = load_sampling_defaults(
        Path(settings.model), settings.generation_config, settings.override_generation_config
    )
    metrics = ServerMetrics(settings.served_model_names[0])
    usages = UsageBook(clock, is_fair=settings.is_fair)
    client = EngineClient(clock, metrics, usages)
    tenants = open_directory(settings, metrics)

    def apply_tenants(table: TenantTable) -> None:
        usages.set_table(table)
        metrics.tenants.set_table(table)
        client.set_tenants(table.message)

    tenants.add_listener(apply_tenants)
    admission = Admission(client.sequences, metrics, clock, usages, max_queued=settings.max_num_queued_reqs)
    metrics.open(
        client.status,
        usages.counts,
        lambda: oldest_waits(list(client.sequences.facts_by_seq.values()), clock.now_s()),
        lambda: admission.max_queued,
    )
    both = Settings(engine=engine or EngineSettings(model=settings.model), server=settings)
    configuration = Configuration(both, origin, metrics.config, time.time)

    def apply_settings(new: SettingsVersion) -> None:
        server = new.settings.server
        metrics.config.on_config(new.version, new.at_s)
        admission.set_max_queued(server.max_num_queued_reqs)
        usages.set_fair(server.is_fair)
        if new.version > 1:  # the engine and the log began with the first one
            client.set_settings(new.version, new.settings.engine)
            set_log_level(server.log_level)

    configuration.add_listener(apply_settings)
    return ServerContext(
        configuration=configuration,
        codec=codec,
        template=template,
        defaults=defaults,
        client=client,
        admission=admission,
        metrics=metrics,
        tenants=tenants,
        clock=clock,
        workers=ThreadPoolExecutor(_TEXT_WORKERS, "text"),
        draw_seed=functools.partial(secrets.randbits, 63),
        wall_s=time.time,
        started_at=int(time.time()),
        traces=make_traces(settings.otlp_traces_endpoint),
    )


class QuietServer(uvicorn.Server):
    """uvicorn without its signal handlers: after a drain it would raise the signal again."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class Daemon:
    """The HTTP server, the engine and the signals, from start to exit code."""

    def __init__(
        self,
        settings: Settings,
        context: ServerContext,
        sock: socket.socket,
        child: EngineChild,
        out: TextIO,
        err: TextIO,
    ) -> None:
        self._settings = settings
        self._context = context
        self._sock = sock
        self._child = child
        self._out = out
        self._err = err
        self._signals = 0
        self._first_signal = asyncio.Event()
        self._second_signal = asyncio.Event()
        self._drained_by_s = 0.0  # end of what --shutdown-timeout grants
        self._reloads: set[asyncio.Task[None]] = set()
        self._notifier = SystemdNotifier(notify_socket(), context.clock)
        self._status = ""  # for the service manager, from the moment the engine serves
        self._log = structlog.stdlib.get_logger("server.launch")

    async def run(self) -> int:
        """Run everything; return the exit code."""
        url = url_of(self._settings.server, self._sock)
        server = QuietServer(self._uvicorn_config())
        child = self._child
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        self._log.info("engine_started", pid=child.pid)
        if self._context.traces is not None:
            self._context.traces.open()
        self._context.metrics.watch_engine(lambda: child.pid)
        try:
            await self._context.client.open(child.sock, self._settings.engine)
            serving = asyncio.create_task(server.serve(sockets=[self._sock]))
            reaper = Reaper(self._context.clock, max(_IDLE_S, 2 * self._settings.server.timeout_keep_alive_s))
            reaping = asyncio.create_task(reaper.run(server.server_state.connections))
            watching = self._start_watching()
            code = await self._live(url, child, serving)
            for task in (reaping, *watching):
                task.cancel()
            server.should_exit = True
            server.force_exit = self._second_signal.is_set()
            await serving
            return await self._dismiss(child, code)
        finally:
            if self._context.traces is not None:
                await asyncio.to_thread(self._context.traces.close, _TRACES_S)
            self._context.workers.shutdown(wait=False, cancel_futures=True)

    def _uvicorn_config(self) -> uvicorn.Config:
        settings = self._settings.server
        return uvicorn.Config(
            create_app(self._context),
            log_config=None,
            log_level=settings.uvicorn_log_level,
            access_log=not settings.disable_uvicorn_access_log,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,  # who a peer is, nobody else says: `is_local` goes by it
            root_path=settings.root_path,
            ssl_keyfile=settings.ssl_keyfile,
            ssl_certfile=settings.ssl_certfile,
            timeout_keep_alive=max(int(settings.timeout_keep_alive_s), 1),
            timeout_graceful_shutdown=int(_FLUSH_S),
        )

    def _start_watching(self) -> list["asyncio.Task[None]"]:
        """Keep the watchdog of the service manager quiet, where there is one, until the engine hangs."""
        silence_s, context = watchdog_s(), self._context

        def is_well() -> bool:
            return context.client.status.state is not EngineState.READY or not context.is_stalled

        return [] if silence_s is None else [asyncio.create_task(self._notifier.watch(silence_s, is_well))]

    def _on_signal(self) -> None:
        self._signals += 1
        if self._signals == 1:
            most_s = self._context.settings.shutdown_timeout_s + _FLUSH_S + 3 * _ENGINE_PATIENCE_S
            self._notifier.stopping("letting answers finish", most_s)
        (self._first_signal if self._signals == 1 else self._second_signal).set()

    def _on_hangup(self) -> None:
        """Read the settings and the tenants again, unless a reload that has not begun will do it."""
        if not self._signals and len(self._reloads) < _MOST_RELOADS:
            reload = asyncio.ensure_future(self._reload())
            self._reloads.add(reload)
            reload.add_done_callback(self._reloads.discard)

    async def _reload(self) -> None:
        """Take what the files say now; what is wrong has been logged and counted."""
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

    async def _live(self, url: str, child: EngineChild, serving: "asyncio.Task[None]") -> int:
        """Load, serve, drain. Streams are settled when it returns. Raises what ended the HTTP server, if it failed."""
        client = self._context.client
        asked = asyncio.create_task(self._first_signal.wait())
        gone = asyncio.create_task(client.status.wait_gone())
        loaded = asyncio.create_task(client.status.wait_ready())
        try:
            await asyncio.wait([asked, gone, loaded, serving], return_when=asyncio.FIRST_COMPLETED)
            if not asked.done() and client.status.state is EngineState.READY:
                self._announce(url, child)
                await asyncio.wait([asked, gone, serving], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            if not asked.done():
                return await self._engine_ended(client, child)
            if client.status.state is EngineState.LOADING:
                return self._give_up_loading(client)
            return await self._drain(gone)
        finally:
            for task in (asked, gone, loaded):
                task.cancel()
            await asyncio.gather(asked, gone, loaded, return_exceptions=True)

    async def _engine_ended(self, client: EngineClient, child: EngineChild) -> int:
        self._context.admission.close()
        if client.status.failure is not None:
            print(f"tiercel: {client.status.failure.message}", file=self._err, flush=True)
            return EXIT_CONFIG
        was_ready = client.status.ready is not None
        when = "the engine died" if was_ready else f"the engine died at its start ({client.status.stage})"
        print(f"tiercel: {when}: {await child.cause(_CAUSE_S)}", file=self._err, flush=True)
        return EXIT_ENGINE

    def _give_up_loading(self, client: EngineClient) -> int:
        """Asked to leave before anything was served: nothing to drain."""
        self._context.admission.close()
        client.close()  # requests that wait for the model are refused
        return EXIT_OK

    async def _drain(self, gone: "asyncio.Task[None]") -> int:
        """Refuse new work, let streams finish for a while, then end them with an error event."""
        client, timeout_s = self._context.client, self._context.settings.shutdown_timeout_s
        self._drained_by_s = self._context.clock.now_s() + timeout_s
        refusal = shutting_down()
        cut = EngineGone(refusal.message, refusal.code)
        self._context.admission.close()
        self._log.info("draining", open=client.sequences.num_open, timeout_s=timeout_s)
        client.refuse_queued(cut)
        idle = asyncio.create_task(self._wait_idle())
        again = asyncio.create_task(self._second_signal.wait())
        try:
            await asyncio.wait([idle, again, gone], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (idle, again):
                task.cancel()
        client.refuse_all(cut)
        self._log.info("drained", forced=self._second_signal.is_set())
        if client.status.state is EngineState.DEAD:
            return EXIT_ENGINE
        return EXIT_FORCED if self._second_signal.is_set() else EXIT_OK

    async def _dismiss(self, child: EngineChild, code: int) -> int:
        """Let the engine persist with what is left of the drain's time, then leave. A second signal ends that too."""
        client = self._context.client
        patience_s = max(0.0, self._drained_by_s - self._context.clock.now_s()) if code == EXIT_OK else 0.0
        client.quit(patience_s)
        if patience_s:
            gone = asyncio.create_task(client.status.wait_gone())
            again = asyncio.create_task(self._second_signal.wait())
            most_s = patience_s + _ENGINE_PATIENCE_S
            await asyncio.wait([gone, again], timeout=most_s, return_when=asyncio.FIRST_COMPLETED)
            for task in (gone, again):
                task.cancel()
            code = EXIT_FORCED if self._second_signal.is_set() else code
        client.close()
        await child.leave(_ENGINE_PATIENCE_S if code == EXIT_OK else 0.0)
        return code

    async def _wait_idle(self) -> None:
        """Return when every admitted request has got its last token."""
        while self._context.client.sequences.num_open or self._context.admission.num_reserved:  # noqa: ASYNC110 - two counters
            await asyncio.sleep(_POLL_S)

    def _announce(self, url: str, child: EngineChild) -> None:
        """The lines for people, on stdout."""
        ready, settings = self._context.client.status.ready, self._settings.server
        if ready is None:
            return
        name = settings.served_model_names[0]
        self._status = f"serving {name} at {url}"
        self._notifier.ready(self._status)
        self._log.info("ready", url=url, model=name, load_s=round(ready.load_s, 2), engine_pid=child.pid)
        print(_greeting(url, name, settings, has_chat=self._context.template is not None), file=self._out, flush=True)


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
