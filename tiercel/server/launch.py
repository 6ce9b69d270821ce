"""`serve`: from settings to an exit code."""

import asyncio
import contextlib
import gc
import logging
from collections.abc import Sequence
from typing import TextIO

import structlog
from msgspec.structs import replace

from tiercel.server.client.child import engine_command
from tiercel.server.client.inherited import InheritedResources
from tiercel.server.client.supervisor import Supervisor
from tiercel.server.composition import build_context
from tiercel.server.control.memory import return_large_buffers
from tiercel.server.control.predecessor import Predecessor
from tiercel.server.http.activation import open_listener
from tiercel.server.http.descriptors import max_connections
from tiercel.server.http.listen import bind_admin, check_tls
from tiercel.server.http.uvicorn_server import hide_cut_streams, loop_factory
from tiercel.server.leaving import EXIT_CONFIG
from tiercel.server.lifecycle import Daemon
from tiercel.server.links.engines import HEARTBEAT_S, RemoteEngines
from tiercel.settings.config import Resolved
from tiercel.settings.exposure import check_exposure
from tiercel.settings.settings import ServerSettings, Settings
from tiercel.system.log import configure_log
from tiercel.system.standard_streams import error_stream, guard_streams, output_stream, say
from tiercel.values.errors import ConfigError

_GC_THRESHOLDS = (20_000, 20, 50)  # one request makes thousands of objects, few of them cyclic garbage


def serve(
    settings: Settings,
    *,
    origin: Resolved | None = None,
    command: Sequence[str] | None = None,
    out: TextIO | None = None,
    err: TextIO | None = None,
) -> int:
    """Serve until a signal or the engine's end; return the exit code.

    0 after a clean drain, 1 if a second signal cut the drain short, 2 if the settings or the model are wrong, 3 if no
    engine can be kept alive. `origin` is the source of the settings, which a reload reads again. `command` starts
    another engine (for tests); the numbers of inherited descriptors are appended to it.
    """
    guard_streams()
    configure_log(settings.server.log_level, as_json=settings.server.log_format == "json")
    try:
        with contextlib.ExitStack() as resources:
            check_exposure(settings.server)
            check_tls(settings.server)
            max_connections(settings.server)  # raises if there are too few file descriptors
            before = _find_predecessor(settings.server, resources)
            is_front = settings.server.engines is not None
            inherited = None
            if not is_front:
                inherited = InheritedResources.open(settings.engine, is_takeover=before is not None)
                resources.enter_context(inherited)
            sock, server = open_listener(settings.server, None if before is None else before.sock)
            resources.enter_context(sock)
            settings = replace(settings, server=server)
            admin_sock = bind_admin(server, None if before is None else before.admin_sock)
            if admin_sock is not None:
                resources.enter_context(admin_sock)
            supervisor = resources.enter_context(
                RemoteEngines.of(settings.server)
                if inherited is None
                else Supervisor(command or engine_command(), inherited)
            )
            # While the engine's imports run:
            context = build_context(
                settings.server,
                settings.engine,
                origin,
                lambda: supervisor.stall_limit_s,
                is_takeover=before is not None,
            )
            for note in context.answer_style.notes:
                structlog.stdlib.get_logger("server.launch").warning("answer_format", note=note)
            if isinstance(supervisor, RemoteEngines):
                supervisor.read_heartbeat_s = lambda: context.settings.stall_timeout_s or HEARTBEAT_S
            daemon = Daemon(
                settings, context, sock, supervisor, out or output_stream(), err or error_stream(), admin_sock, before
            )
            _settle_heap()
            return_large_buffers()
            hide_cut_streams()
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                return runner.run(daemon.run())
    except ConfigError as exc:
        say(f"tiercel: {exc.message}", err or error_stream())
        return EXIT_CONFIG


def _find_predecessor(settings: ServerSettings, resources: contextlib.ExitStack) -> Predecessor | None:
    """Ask the running daemon for its socket and SSD tier, with --takeover. Errors: ConfigError."""
    if not settings.takeover:
        return None
    found = Predecessor.find(settings)
    if found is None:
        logging.getLogger(__name__).warning("takeover of nothing: no daemon answers, this is an ordinary start")
        return None
    return resources.enter_context(found)


def _settle_heap() -> None:
    """Exempt the objects that exist now, which live until the end, from garbage collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
