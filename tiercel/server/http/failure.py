"""Error responses in OpenAI's shape, with its types and codes; those of Anthropic's API are in its shape."""

import math
from collections.abc import Iterable, Sequence
from typing import cast

import msgspec
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from tiercel.server.http.content_coding import ACCEPTED
from tiercel.server.http.message_failure import encode_message_fault, is_of_messages, message_status
from tiercel.server.http.nearest_route import nearest_route, shown
from tiercel.values.errors import AdmissionError
from tiercel.values.grammar import NOTHING_LEFT

SHUTTING_DOWN = "shutting_down"
_REASON_LETTERS = 400


class Fault(Struct, frozen=True, kw_only=True):
    """The value of `error` in a body or in a stream event."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class FaultBody(Struct, frozen=True):
    """The body of a refusal."""

    error: Fault


def fault_of(error: AdmissionError) -> FaultBody:
    """Return the body of a refusal."""
    return FaultBody(Fault(message=error.message, type=error.kind, param=error.param, code=error.code))


def encode_fault(error: AdmissionError) -> bytes:
    """Return the JSON of a refusal."""
    return msgspec.json.encode(fault_of(error))


def refusal_status(error: AdmissionError, *, is_of_messages: bool) -> int:
    """Return the HTTP status of a refusal, in Anthropic's API or in any other."""
    return message_status(error) if is_of_messages else error.status


def refusal_body(error: AdmissionError, request_id: str | None, *, is_of_messages: bool) -> bytes:
    """Return the JSON of a refusal, in the shape of Anthropic's API or of any other."""
    return encode_message_fault(error, request_id) if is_of_messages else encode_fault(error)


def fault_response(error: AdmissionError, scope: Scope) -> Response:
    """Return a refusal as a response with its headers."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    if error.status == 504:
        headers["X-Should-Retry"] = "false"  # read by OpenAI's SDKs, which otherwise try twice more
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 415:
        headers["Accept-Encoding"] = ACCEPTED
    if error.code == SHUTTING_DOWN or error.status in (408, 413):
        headers["Connection"] = "close"
    request_id, is_anthropic = scope.get("state", {}).get("request_id"), is_of_messages(scope)
    body = refusal_body(error, request_id, is_of_messages=is_anthropic)
    return Response(body, refusal_status(error, is_of_messages=is_anthropic), headers, "application/json")


async def on_admission_error(request: Request, error: Exception) -> Response:
    """Answer a refusal by our own code."""
    assert isinstance(error, AdmissionError)
    return fault_response(error, request.scope)


def http_error(
    request: Request, error: HTTPException, routes: Iterable[str] = (), methods: Sequence[str] = ()
) -> Response:
    """Answer a refusal by the framework: unknown routes and methods.

    `routes` are those that a client may have meant; `methods` those of the requested route.
    """
    path = route_path(request.scope)
    match error.status_code:
        case 404:
            refusal = no_route(path, nearest_route(path, routes))
        case 405:
            takes = f" It takes {' and '.join(methods)}." if methods else ""
            message = f"The route {shown(path)} does not take {shown(request.method)}.{takes}"
            refusal = AdmissionError(405, message, code="method_not_allowed")
        case status:
            refusal = AdmissionError(status, "The request cannot be served.", code="invalid_request")
    response = fault_response(refusal, request.scope)
    response.headers.update(error.headers or {})
    if methods:
        response.headers["allow"] = ", ".join(methods)
    return response


def no_route(path: str, nearest: str | None = None) -> AdmissionError:
    """Return the refusal of a path that is no route. `nearest` is the route that the client probably meant."""
    hint = "" if nearest is None else f" The nearest is {nearest}."
    return AdmissionError(404, f"There is no route {shown(path)}.{hint}", code="not_found")


def route_path(scope: Scope) -> str:
    """Return the path of a request without the prefix of --root-path."""
    return cast(str, scope["path"]).removeprefix(cast(str, scope.get("root_path", ""))) or "/"


def internal_error(error_id: str) -> AdmissionError:
    """Return the refusal for an unexpected error. The log has the details under the same id."""
    return AdmissionError(
        500, f"Internal server error (error id {error_id}).", code="internal_error", kind="server_error"
    )


def slow_reader() -> AdmissionError:
    """Return the refusal for a client that did not read before its answer began."""
    return AdmissionError(408, "The client did not read from this connection.", code="slow_reader")


def engine_failed(error_id: str) -> AdmissionError:
    """Return the refusal for a request that the engine failed."""
    return AdmissionError(
        500, f"The engine failed this request (error id {error_id}).", code="engine_error", kind="server_error"
    )


def request_failed(reason: str) -> AdmissionError:
    """Return the refusal for a request whose fields allow no further token. `reason` is the engine's message."""
    code = "no_token_left" if reason == NOTHING_LEFT else "grammar_failed"
    return AdmissionError(400, reason[:_REASON_LETTERS], code=code)
