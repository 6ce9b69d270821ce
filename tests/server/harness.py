"""A server in a test: real uvicorn on loopback with a fake engine."""

import asyncio
import contextlib
import datetime
import itertools
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
import uvicorn
from msgspec.structs import replace

from tests.server.fake_engine import FakeEngine, Script
from tiercel.server.api.context import ServerContext
from tiercel.server.app import create_app
from tiercel.server.composition import build_context
from tiercel.server.http.body_writer import BodyWritingProtocol
from tiercel.server.http.gate import ConnectionGate, ConnectionLimits
from tiercel.server.http.listen import bind
from tiercel.server.http.uvicorn_server import QuietServer
from tiercel.server.text.chat_template import TemplateRendering
from tiercel.server.text.template_renderer import TemplateRenderer
from tiercel.server.ui.past import ServerPast
from tiercel.settings.config import Resolved
from tiercel.settings.settings import EngineSettings, ServerSettings

MODEL = "tiny"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('only system, user and assistant') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>{% endif %}{% endif %}"
)
T = TypeVar("T")

_NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # those of the system take a client 30 ms to read


@dataclass
class Running:
    """One server under test."""

    context: ServerContext
    engine: FakeEngine
    server: uvicorn.Server
    http: httpx.AsyncClient
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class PromptServer(QuietServer):
    """A server that ends as soon as it is told to: uvicorn looks ten times a second, and then waits for a tenth."""

    async def main_loop(self) -> None:
        for tick in itertools.count():
            if await self.on_tick(tick):
                return
            await asyncio.sleep(0.01)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        assert self.config.timeout_graceful_shutdown is not None
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                await self._wait_tasks_to_complete()
        except TimeoutError:
            for task in self.server_state.tasks:
                task.cancel()


def server_settings(model_folder: Path) -> ServerSettings:
    return ServerSettings(model=str(model_folder), served_model_names=(MODEL, "alias"), port=0)


def _render_here(source: str, specials: Mapping[str, str], tool_source: str | None) -> TemplateRendering:
    """Render in this process: starting another one takes a tenth of a second."""
    return TemplateRenderer(source, specials, tool_source, today=datetime.datetime.now)


@contextlib.asynccontextmanager
async def running(
    settings: ServerSettings,
    script: Script | None = None,
    *,
    wait: bool = True,
    changed: Callable[[ServerContext], ServerContext] = lambda context: context,
    origin: Resolved | None = None,
    writes_bodies: bool = True,
    limits: ConnectionLimits | None = None,
    open_template: Callable[[str, Mapping[str, str], str | None], TemplateRendering] = _render_here,
) -> AsyncIterator[Running]:
    """Serve until the block ends; with `writes_bodies=False` as on a server that has no `BodyWriter`."""
    context = changed(build_context(settings, origin=origin, open_template=open_template))
    engine = FakeEngine(script or Script())
    ours, theirs = socket.socketpair()
    await engine.open(theirs)
    await context.client.open(ours, EngineSettings(model=settings.model))
    listener = bind(settings)
    port = listener.getsockname()[1]
    past = ServerPast(context)
    app = create_app(context, past=past)
    if context.batches is not None:
        context.batches.start(app)
    config = uvicorn.Config(
        app,
        http=BodyWritingProtocol.factory(
            ConnectionGate(limits or ConnectionLimits(), on_refusal=context.metrics.on_refused)
        )
        if writes_bodies
        else "auto",
        log_config=None,
        log_level="critical",
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=2,
    )
    server = PromptServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    recording = asyncio.create_task(past.run())
    if wait:
        await context.client.status.wait_ready()
        if context.batches is not None:
            await context.batches.wait_open()
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20, verify=_NO_AUTHORITIES) as http:
            yield Running(context, engine, server, http, port)
    finally:
        recording.cancel()
        if context.batches is not None:
            await context.batches.stop()
        server.should_exit = True
        await serving
        context.client.close()
        engine.die()
        await engine.closed.wait()
        assert isinstance(context.workers, ThreadPoolExecutor)
        context.workers.shutdown()
        context.close()


def with_server(
    settings: ServerSettings, test: Callable[[Running], Awaitable[T]], script: Script | None = None, **changes: object
) -> T:
    """Run one async test against its own server."""

    async def run() -> T:
        async with running(replace(settings, **changes), script) as server:
            return await test(server)

    return asyncio.run(run())


async def until(condition: Callable[[], bool], limit_s: float = 5.0) -> None:
    """Wait until a condition holds. Errors: TimeoutError."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - any condition
            await asyncio.sleep(0.005)


def chat_body(content: str = "hello world", **more: object) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **more}


def text_body(prompt: object = "hello world", **more: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": prompt, **more}
