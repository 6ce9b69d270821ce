"""Error responses in Anthropic's shape, for /v1/messages, the routes below it, and the models that its clients ask for.

Source: https://docs.claude.com/en/api/errors.
"""

import msgspec
from msgspec import Struct
from starlette.types import Scope

from tiercel.values.errors import AdmissionError

_PATH = "/v1/messages"
_MODELS = "/v1/models"
_OVERLOADED = frozenset({"overloaded", "queue_timeout", "too_many_connections"})
_OVERLOADED_STATUS = 529
_KIND_BY_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    _OVERLOADED_STATUS: "overloaded_error",
}


class MessageFaultDetails(Struct, frozen=True):
    """The cause of an error, for programs."""

    error_code: str


class MessageFault(Struct, frozen=True, kw_only=True):
    """The value of `error` in a body or in a stream event."""

    type: str
    message: str
    details: MessageFaultDetails


class MessageFaultBody(Struct, frozen=True, tag_field="type", tag="error"):
    """The body of a refusal, and the data of an `error` event."""

    error: MessageFault
    request_id: str | None


def is_messages_path(path: str) -> bool:
    """Return whether a path, which may have a prefix and a query, is one of those whose errors have this shape."""
    bare = path.partition("?")[0]
    return bare.endswith(_PATH) or f"{_PATH}/" in bare


def is_of_messages(scope: Scope) -> bool:
    """Return whether the answer to a request has Anthropic's shape: by its path, or on /v1/models by its header."""
    path: str = scope.get("path", "")
    if is_messages_path(path):
        return True
    is_models = path.endswith(_MODELS) or f"{_MODELS}/" in path
    return is_models and any(name == b"anthropic-version" for name, _ in scope.get("headers", ()))


def message_status(error: AdmissionError) -> int:
    """Return the HTTP status of a refusal; that of an overload is Anthropic's own."""
    return _OVERLOADED_STATUS if error.status == 503 and error.code in _OVERLOADED else error.status


def message_fault_of(error: AdmissionError, request_id: str | None) -> MessageFaultBody:
    """Return the body of a refusal."""
    status = message_status(error)
    kind = _KIND_BY_STATUS.get(status, "invalid_request_error" if status < 500 else "api_error")
    fault = MessageFault(type=kind, message=error.message, details=MessageFaultDetails(error.code))
    return MessageFaultBody(fault, request_id)


def encode_message_fault(error: AdmissionError, request_id: str | None) -> bytes:
    """Return the JSON of a refusal."""
    return msgspec.json.encode(message_fault_of(error, request_id))
