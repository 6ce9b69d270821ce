"""Routes for operators: health, readiness, load, version, metrics."""

import functools

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tiercel import __version__
from tiercel.errors import AdmissionError
from tiercel.server.api.context import ServerContext
from tiercel.server.engine.status import EngineState
from tiercel.server.tenancy.auth import MetricsGuard
from tiercel.server.tenancy.directory import in_thread

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_DETAIL = "tenants"
"""The one detail of /metrics."""


class OpsRoutes:
    """Answers from memory; never waits for the engine."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def open_router(self) -> APIRouter:
        """Routes that need no key."""
        router = APIRouter(tags=["operations"])
        for path in ("/health", "/ping"):
            router.add_api_route(path, self.health, methods=["GET"], response_model=None)
        router.add_api_route("/ping", self.health, methods=["POST"], response_model=None)
        router.add_api_route("/health/live", self.live, methods=["GET"], response_model=None)
        for path in ("/ready", "/readiness", "/health/ready"):
            router.add_api_route(path, self.ready, methods=["GET"], response_model=None)
        router.add_api_route("/version", self.version, methods=["GET"], response_model=None)
        guard = MetricsGuard(self._context.tenants)
        router.add_api_route(
            "/metrics", self.metrics, methods=["GET"], response_model=None, dependencies=[Depends(guard)]
        )
        return router

    def guarded_router(self) -> APIRouter:
        """Routes that need a key."""
        router = APIRouter(tags=["operations"])
        if self._context.settings.enable_server_load_tracking:
            router.add_api_route("/load", self.load, methods=["GET"], response_model=None)
        return router

    async def health(self) -> Response:
        """200 while the engine serves and its steps end."""
        state = self._context.client.status.state
        if state is EngineState.READY and self._context.is_stalled:
            return JSONResponse(
                {"status": "stalled", "silence_s": round(self._context.client.status.silence_s(), 1)}, 503
            )
        if state is EngineState.READY:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": state.value, "stage": self._context.client.status.stage}, 503)

    async def live(self) -> Response:
        """200 while this process answers at all."""
        return JSONResponse({"status": "ok"})

    async def ready(self) -> Response:
        """200 when a new request would be served now."""
        client = self._context.client
        if client.status.state is EngineState.LOADING:
            return _unready("loading", f"Loading model: {client.status.stage}", client.status.stage)
        if client.status.state is not EngineState.READY:
            return _unready("dead", "The engine has stopped", client.status.stage)
        if self._context.admission.is_closed:
            return _unready("draining", "The server is shutting down", "draining")
        if self._context.is_stalled:
            return _unready("stalled", "No step has ended for too long", "stalled")
        return JSONResponse({"status": "ready"})

    async def version(self) -> Response:
        """Our version."""
        return JSONResponse({"version": __version__})

    async def load(self) -> Response:
        """Sequences that clients wait for."""
        return JSONResponse({"server_load": self._context.client.sequences.num_open})

    async def metrics(self, request: Request) -> Response:
        """Prometheus text, with `?detail=tenants` more than ten lines a tenant. Errors: AdmissionError (400)."""
        detail = request.query_params.get("detail")
        if detail not in (None, _DETAIL):
            raise AdmissionError(400, f"detail must be {_DETAIL} or absent, not {detail[:64]}", param="detail")
        page = functools.partial(self._context.metrics.exposition, has_detail=detail is not None)
        text = await in_thread(page)
        return Response(text, headers={"content-type": _METRICS_TYPE})


def _unready(status: str, message: str, stage: str) -> Response:
    error = {"message": message, "type": "unavailable_error", "param": None, "code": status}
    return JSONResponse({"status": status, "stage": stage, "error": error}, 503, {"Retry-After": "2"})
