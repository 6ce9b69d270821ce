"""Request bodies: bytes to a checked JSON object."""

import asyncio
from typing import cast

import msgspec
from starlette.requests import ClientDisconnect, Request

from server.watch import ClientGoneError
from tiercel.errors import AdmissionError

MAX_DEPTH = 64
_READ_S = 30.0


async def read_object(request: Request) -> dict[str, object]:
    """Read the body of a request as a JSON object.

    Errors: AdmissionError (400 for what is not JSON, 408 for a client that dawdles, 413 from the body limit);
    ClientGoneError.
    """
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != "application/json":
        raise AdmissionError(400, "Unsupported Media Type: Only 'application/json' is allowed", code="invalid_json")
    try:
        async with asyncio.timeout(_READ_S):
            body = await request.body()
    except TimeoutError as exc:
        raise AdmissionError(408, "The request body did not arrive in time.", code="request_timeout") from exc
    except ClientDisconnect as exc:
        raise ClientGoneError from exc
    return parse_object(body)


def parse_object(body: bytes) -> dict[str, object]:
    """Strict JSON: no NaN, no lone surrogates, at most MAX_DEPTH levels. Errors: AdmissionError (400)."""
    try:
        value: object = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        raise AdmissionError(400, "The body is not valid JSON.", code="invalid_json") from exc
    if not isinstance(value, dict):
        raise AdmissionError(400, "The body must be a JSON object.", code="invalid_json")
    fields = cast(dict[str, object], value)
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _is_deeper(fields, MAX_DEPTH):
        raise AdmissionError(400, f"The body nests deeper than {MAX_DEPTH} levels.", code="invalid_json")
    return fields


def _is_deeper(value: object, levels: int) -> bool:
    """Walks containers level by level; leaves cost nothing but a look at their type."""
    level: list[object] = [value]
    for _ in range(levels):
        level = [entry for container in level for entry in _entries(container) if isinstance(entry, list | dict)]
        if not level:
            return False
    return True


def _entries(container: object) -> list[object]:
    if isinstance(container, dict):
        return list(cast(dict[str, object], container).values())
    return cast(list[object], container)
