"""Pure ASGI layers: request ids and the one log line, the body limit, the last boundary for the unexpected."""

import asyncio
import contextlib
import re
import secrets
import traceback
from typing import cast

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.failure import fault_response, internal_error, slow_reader
from server.metrics import ServerMetrics
from server.story import RequestStory
from server.watch import ClientGoneError, SlowReaderError
from tiercel.clock import Clock
from tiercel.errors import AdmissionError

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_UNCOUNTED = frozenset(
    {"/metrics", "/health", "/load", "/ping", "/version", "/health/live", "/health/ready", "/ready", "/readiness"}
)
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})  # a client may invent more
_CLIENT_CLOSED = 499
_LINGER_S = 1.0


def story_of(scope: Scope) -> RequestStory:
    """The story that `Bookkeeping` put into the scope."""
    return cast(RequestStory, scope["state"]["story"])


class Bookkeeping:
    """Gives every request an id and a story; counts it and logs it at its end."""

    def __init__(
        self, app: ASGIApp, metrics: ServerMetrics, clock: Clock, *, echo_id: bool, log_requests: bool
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._clock = clock
        self._echo_id = echo_id
        self._log_requests = log_requests
        self._log = structlog.stdlib.get_logger("server.request")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client_id = Headers(scope=scope).get("x-request-id", "")
        is_clients = _REQUEST_ID.fullmatch(client_id) is not None
        story = RequestStory(client_id if is_clients else secrets.token_hex(16), self._clock.now_s())
        scope.setdefault("state", {})["story"] = story
        echo = story.request_id.encode() if is_clients or self._echo_id else None

        async def send_noted(message: Message) -> None:
            is_start = message["type"] == "http.response.start"
            if is_start:
                own = [] if echo is None else [(b"x-request-id", echo)]
                message = {**message, "headers": [*message["headers"], *own, *story.headers()]}
            await send(message)
            if is_start:
                story.status = message["status"]

        try:
            await self._app(scope, receive, send_noted)
        finally:
            self._close(scope, story)

    def _close(self, scope: Scope, story: RequestStory) -> None:
        handler = getattr(scope.get("route"), "path", "none")
        seconds = self._clock.now_s() - story.arrival_s
        status = story.status or _CLIENT_CLOSED
        if handler not in _UNCOUNTED:
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.on_http(method, handler, status, seconds)
        if self._log_requests and story.is_generation:
            self._log.info("request_done", route=handler, status=status, **story.summary(seconds))


class Boundary:
    """The one place where HTTP code may fail in an unexpected way: a fixed text and an error id, no details."""

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
            story_of(scope).outcome = "client_gone"
        except SlowReaderError:
            story = story_of(scope)
            story.outcome = "slow_reader"
            if story.status is None:
                await fault_response(slow_reader())(scope, receive, send)
        except Exception as exc:
            await self._answer(exc, scope, receive, send)

    async def _answer(self, exc: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        story = story_of(scope)
        error_id = secrets.token_hex(8)
        frames = traceback.format_tb(exc.__traceback__)  # without the exception's text: it may quote a prompt
        self._log.error(
            "internal_error", error_id=error_id, request_id=story.request_id, kind=type(exc).__name__, frames=frames
        )
        if story.status is None:
            await fault_response(internal_error(error_id))(scope, receive, send)


async def _linger(receive: Receive) -> None:
    """Read on for a moment: closing on unread bytes resets the connection, and the client misses the answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            more = True
            while more:
                more = (await receive()).get("more_body", False)


class BodyLimit:
    """Refuses bodies over a limit, by their declared and by their real length."""

    def __init__(self, app: ASGIApp, limit_bytes: int) -> None:
        self._app = app
        self._limit_bytes = limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        if not declared.isdecimal() or int(declared[:20]) > self._limit_bytes:
            await _linger(receive)
            await fault_response(self._too_large())(scope, receive, send)
            return
        seen_bytes = 0

        async def receive_counted() -> Message:
            nonlocal seen_bytes
            message = await receive()
            if message["type"] == "http.request":
                seen_bytes += len(message.get("body", b""))
                if seen_bytes > self._limit_bytes:
                    await _linger(receive)
                    raise self._too_large()
            return message

        await self._app(scope, receive_counted, send)

    def _too_large(self) -> AdmissionError:
        return AdmissionError(
            413, f"The request body is larger than {self._limit_bytes} bytes.", code="request_too_large"
        )
