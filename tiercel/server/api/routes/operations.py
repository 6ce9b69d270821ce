"""Routes for operators and probes: health, readiness, load, version and metrics."""

import asyncio
import functools

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from tiercel import __version__
from tiercel.server.api.context import ServerContext
from tiercel.server.api.contract import KEY_REFUSALS, ApiRoute, Contract, QueryField
from tiercel.server.api.replies.operations import HealthReply, LoadReply, ReadyReply, UnreadyStatus, VersionReply
from tiercel.server.client.status import EngineState
from tiercel.server.http.answer import json_answer
from tiercel.server.http.failure import Fault
from tiercel.server.tenancy.directory import in_thread
from tiercel.values.errors import AdmissionError

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_DETAIL = "tenants"  # the only detail of /metrics


class OperationsRoutes:
    """Handlers that answer from memory and never wait for the engine."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def open_routes(self) -> list[ApiRoute]:
        """Return the routes that need no key."""
        health = Contract(answers={200: HealthReply, 503: HealthReply})
        ready = Contract(answers={200: ReadyReply, 503: ReadyReply})
        return [
            ApiRoute("GET", "/health", self.health, health),
            ApiRoute("GET", "/ping", self.health, health),
            ApiRoute("POST", "/ping", self.health, health),
            ApiRoute("GET", "/health/live", self.live, Contract(answers={200: HealthReply})),
            ApiRoute("GET", "/ready", self.ready, ready),
            ApiRoute("GET", "/readiness", self.ready, ready),
            ApiRoute("GET", "/health/ready", self.ready, ready),
            ApiRoute("GET", "/version", self.version, Contract(answers={200: VersionReply})),
        ]

    def metrics_routes(self) -> list[ApiRoute]:
        """Return the route of /metrics, which is open to clients on this machine."""
        detail = QueryField(
            "detail", {"type": "string", "enum": [_DETAIL]}, "`tenants`: also the lines of every tenant."
        )
        contract = Contract(
            query=(detail,), text_type="text/plain", refusals=(400, *KEY_REFUSALS), is_open_locally=True
        )
        return [ApiRoute("GET", "/metrics", self.metrics, contract)]

    def guarded_routes(self) -> list[ApiRoute]:
        """Return the routes that need a key."""
        if not self._context.settings.enable_server_load_tracking:
            return []
        return [ApiRoute("GET", "/load", self.load, Contract(answers={200: LoadReply}, refusals=KEY_REFUSALS))]

    async def health(self, _: Request) -> Response:
        """Answer 200 while the engine serves and its steps end."""
        engine = self._context.client.status
        engines = dict(self._context.client.state_by_engine) or UNSET
        if engine.state is not EngineState.READY:
            return json_answer(HealthReply(status=engine.state.value, stage=engine.stage, engines=engines), 503)
        if engine.is_stalled:
            return json_answer(HealthReply(status="stalled", silence_s=round(engine.silence_s(), 1)), 503)
        return json_answer(HealthReply(status="ok", engines=engines))

    async def live(self, _: Request) -> Response:
        """Answer 200 while this process answers at all."""
        return json_answer(HealthReply(status="ok"))

    async def ready(self, _: Request) -> Response:
        """Answer 200 when a new request would be served now."""
        engine = self._context.client.status
        if engine.state is EngineState.LOADING:
            return _unready("loading", f"Loading model: {engine.stage}", engine.stage)
        if engine.state is EngineState.RESTARTING:
            return _unready("restarting", f"The engine is being restarted: {engine.stage}", engine.stage)
        if engine.state is not EngineState.READY:
            return _unready("dead", "The engine has stopped", engine.stage)
        if self._context.admission.is_closed:
            return _unready("draining", "The server is shutting down", "draining")
        if engine.is_stalled:
            return _unready("stalled", "No step has ended for too long", "stalled")
        return json_answer(ReadyReply(status="ready"))

    async def version(self, _: Request) -> Response:
        """Return the version of tiercel."""
        return json_answer(VersionReply(__version__))

    async def load(self, _: Request) -> Response:
        """Return the number of sequences that clients wait for."""
        return json_answer(LoadReply(self._context.client.sequences.num_open))

    async def metrics(self, request: Request) -> Response:
        """Return the metrics as Prometheus text; `?detail=tenants` adds the lines of every tenant."""
        detail = request.query_params.get("detail")
        if detail not in (None, _DETAIL):
            raise AdmissionError(400, f"detail must be {_DETAIL} or absent, not {detail[:64]}", param="detail")
        self._context.metrics.on_scrape(len(asyncio.all_tasks()))
        page = functools.partial(self._context.metrics.exposition, has_detail=detail is not None)
        text = await in_thread(page)
        return Response(text, headers={"content-type": _METRICS_TYPE})


def _unready(status: UnreadyStatus, message: str, stage: str) -> Response:
    error = Fault(message=message, type="unavailable_error", code=status)
    return json_answer(ReadyReply(status=status, stage=stage, error=error), 503, {"Retry-After": "2"})
