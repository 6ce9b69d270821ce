"""Errors as clients see them: OpenAI's body, its types and codes."""

import math
from typing import cast

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from tiercel.errors import AdmissionError

SHUTTING_DOWN = "shutting_down"


class Fault(Struct, frozen=True, kw_only=True):
    """The value of `error` in a body or in an event of a stream."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class FaultBody(Struct, frozen=True):
    error: Fault


def fault_of(error: AdmissionError) -> FaultBody:
    """The body of a refusal."""
    return FaultBody(Fault(message=error.message, type=error.kind, param=error.param, code=error.code))


def encode_fault(error: AdmissionError) -> bytes:
    """The JSON of a refusal."""
    return msgspec.json.encode(fault_of(error))


def fault_response(error: AdmissionError) -> Response:
    """A refusal as a response with the headers that belong to it."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.code == SHUTTING_DOWN or error.status in (408, 413):
        headers["Connection"] = "close"
    return Response(encode_fault(error), error.status, headers, "application/json")


_REASONS: dict[int, tuple[str, str]] = {
    404: ("The requested route does not exist.", "not_found"),
    405: ("The method is not allowed for this route.", "method_not_allowed"),
}


async def on_admission_error(_request: Request, error: Exception) -> Response:
    """Handler for our own refusals."""
    assert isinstance(error, AdmissionError)
    return fault_response(error)


async def on_http_error(_request: Request, error: Exception) -> Response:
    """Handler for refusals by the framework: unknown routes and methods."""
    status = getattr(error, "status_code", 400)
    message, code = _REASONS.get(status, ("The request cannot be served.", "invalid_request"))
    response = fault_response(AdmissionError(status, message, code=code))
    headers: object = getattr(error, "headers", None)
    if isinstance(headers, dict):
        response.headers.update(cast(dict[str, str], headers))
    return response


def internal_error(error_id: str) -> AdmissionError:
    """The one text for everything unexpected; the log has the rest under the same id."""
    return AdmissionError(
        500, f"Internal server error (error id {error_id}).", code="internal_error", kind="server_error"
    )


def slow_reader() -> AdmissionError:
    """The client let the connection fill up before its answer began."""
    return AdmissionError(408, "The client did not read from this connection.", code="slow_reader")


def engine_failed(error_id: str) -> AdmissionError:
    """The engine failed this request alone."""
    return AdmissionError(
        500, f"The engine failed this request (error id {error_id}).", code="engine_error", kind="server_error"
    )
