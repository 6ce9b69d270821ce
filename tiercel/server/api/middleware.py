"""Pure ASGI layers: request ids and the log line, the body limit, and the handler of unexpected errors."""

import asyncio
import re
import secrets
import traceback
from collections.abc import Callable
from typing import cast

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tiercel.server.client.generation import Generation
from tiercel.server.http.failure import fault_response, internal_error, slow_reader
from tiercel.server.http.message_failure import is_of_messages
from tiercel.server.http.watch import ClientGoneError, SlowReaderError
from tiercel.server.metrics.registry import ServerMetrics
from tiercel.server.tracing.context import begin_context, read_context
from tiercel.server.tracing.record import RequestRecord
from tiercel.server.tracing.sink import TraceSink
from tiercel.server.tracing.trace import trace_of
from tiercel.values.clock import Clock

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_UNCOUNTED = frozenset(
    {
        *("/metrics", "/health", "/load", "/ping", "/version", "/health/live", "/health/ready", "/ready", "/readiness"),
        *("/ui/data", "/ui/past"),
    }
)
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})  # others are counted as "other"
_GENERATION_PATHS = (  # each of their requests has a log line
    *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"),
    *("/v1/embeddings", "/v1/rerank", "/v1/score"),
)
_CLIENT_CLOSED = 499  # logged status if the client closed the connection first
_ENGINE_S = 5.0  # to wait for the report of an aborted sequence


def record_of(scope: Scope) -> RequestRecord:
    """Return the record that `RequestAccounting` has put into the scope."""
    return cast(RequestRecord, scope["state"]["request_record"])


class RequestAccounting:
    """Gives every request an id and a record. When it ends, counts and logs it and exports its trace."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: ServerMetrics,
        clock: Clock,
        wall_s: Callable[[], float],
        traces: TraceSink | None,
        *,
        echo_id: bool,
        log_requests: bool,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._clock = clock
        self._wall_s = wall_s
        self._traces = traces
        self._echo_id = echo_id
        self._log_requests = log_requests
        self._unsettled: set[asyncio.Task[None]] = set()
        self._log = structlog.stdlib.get_logger("server.request")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        client_id = headers.get("x-request-id", "")
        is_from_client = _REQUEST_ID.fullmatch(client_id) is not None
        record = RequestRecord(client_id if is_from_client else secrets.token_hex(16), self._clock)
        record.is_generation = scope["method"] == "POST" and scope["path"].endswith(_GENERATION_PATHS)
        if record.is_generation:
            record.trace = read_context(headers) or (None if self._traces is None else begin_context())
        state = scope.setdefault("state", {})
        state["request_record"], state["request_id"] = record, record.request_id
        echo = record.request_id.encode() if is_from_client or self._echo_id else None

        async def send_noted(message: Message) -> None:
            is_start = message["type"] == "http.response.start"
            if is_start:
                own = [] if echo is None else [(b"x-request-id", echo)]
                if is_of_messages(scope):
                    own.append((b"request-id", record.request_id.encode()))
                message = {**message, "headers": [*message["headers"], *own, *record.headers()]}
            await send(message)
            if is_start:
                record.status = message["status"]

        try:
            await self._app(scope, receive, send_noted)
        finally:
            self._close(scope, record)

    def _close(self, scope: Scope, record: RequestRecord) -> None:
        record.close()
        handler = getattr(scope.get("route"), "path", "none")
        status = record.status or _CLIENT_CLOSED
        if handler not in _UNCOUNTED:
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.on_http(method, handler, status, record.duration_s)
        if not record.is_generation or not (self._log_requests or self._traces):
            return
        if record.generation is None or record.is_settled:
            self._publish(record, handler, status)
            return
        task = asyncio.get_running_loop().create_task(self._publish_settled(record, record.generation, handler, status))
        self._unsettled.add(task)
        task.add_done_callback(self._unsettled.discard)

    async def _publish_settled(self, record: RequestRecord, generation: Generation, handler: str, status: int) -> None:
        """Publish the record once the engine has reported the sequences, or after `_ENGINE_S`."""
        try:
            if record.background is not None:
                await asyncio.wait([record.background])
            await generation.settle(_ENGINE_S)
        finally:
            self._publish(record, handler, status)

    def _publish(self, record: RequestRecord, handler: str, status: int) -> None:
        if self._log_requests:
            self._log.info("request_done", route=handler, status=status, **record.summary())
        if self._traces is not None and record.trace is not None:
            epoch_s = self._wall_s() - self._clock.now_s()
            self._traces.take(
                trace_of(record, record.trace, method="POST", route=handler, status=status, epoch_s=epoch_s)
            )


class ErrorBoundary:
    """Answers unexpected errors with a fixed text and an error id; only the log has the details."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._log = structlog.stdlib.get_logger("server.error")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        except ClientGoneError:
            record_of(scope).outcome = "client_gone"
        except SlowReaderError:
            record = record_of(scope)
            record.outcome = "slow_reader"
            if record.status is None:
                await fault_response(slow_reader(), scope)(scope, receive, send)
        except Exception as exc:
            await self._answer(exc, scope, receive, send)

    async def _answer(self, exc: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        error_id = secrets.token_hex(8)
        frames = traceback.format_tb(exc.__traceback__)  # without the exception's text, which may quote a prompt
        self._log.error(
            "internal_error", error_id=error_id, request_id=record.request_id, kind=type(exc).__name__, frames=frames
        )
        if record.status is None:
            await fault_response(internal_error(error_id), scope)(scope, receive, send)
