"""Request bodies: bytes to a checked JSON object, without blocking the event loop for a large one."""

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar, cast

import msgspec
from starlette.requests import ClientDisconnect, Request

from tiercel.errors import AdmissionError
from tiercel.server.http.watch import ClientGoneError

MAX_DEPTH = 64
MAX_CONTAINERS = 16_384  # objects and arrays: more than 2,048 messages with 8,192 content parts need
MAX_STRINGS = 65_536  # names and values
_READ_S = 30.0
_LARGE_BYTES = 64 * 1024  # more than this is decoded by a worker

T = TypeVar("T")


class InWorker(Protocol):
    """Runs work in a thread, off the event loop."""

    async def __call__(self, work: Callable[[], T]) -> T: ...


async def read_object(request: Request, in_worker: InWorker, *, max_values: int) -> dict[str, object]:
    """Read the body of a request as a JSON object of at most `max_values` values.

    Errors: AdmissionError (400 if it is not such an object, 408 if it comes too slowly, 413 from the body limit);
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
    if len(body) > _LARGE_BYTES:
        return await in_worker(lambda: parse_object(body, max_values=max_values))
    return parse_object(body, max_values=max_values)


def parse_object(body: bytes, *, max_values: int) -> dict[str, object]:
    """Parse strict JSON: no NaN, no lone surrogates, at most MAX_DEPTH levels, no more parts than a request can have.

    Errors: AdmissionError (400).
    """
    _refuse_crowded(body, max_values)
    try:
        value: object = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        raise AdmissionError(400, "The body is not valid JSON.", code="invalid_json") from exc
    if not isinstance(value, dict):
        raise AdmissionError(400, "The body must be a JSON object.", code="invalid_json")
    fields = cast(dict[str, object], value)
    if _count_containers(body) > MAX_DEPTH and _is_deeper(fields, MAX_DEPTH):
        raise AdmissionError(400, f"The body nests deeper than {MAX_DEPTH} levels.", code="invalid_json")
    return fields


def _refuse_crowded(body: bytes, max_values: int) -> None:
    """Refuse a body that would become millions of objects, before decoding it: decoding holds the interpreter lock.

    The whole body is counted first; only if that exceeds a limit, the text outside its strings is counted. For a body
    that is not JSON the counts are right up to the place where decoding fails.
    """
    if _is_within(body, body, max_values):
        return
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if unescaped.count(b'"') <= 2 * MAX_STRINGS:
        outside = b"".join(unescaped.split(b'"')[::2])
        if _is_within(unescaped, outside, max_values):
            return
    raise AdmissionError(
        400,
        f"The body is too complex: a request can have at most {MAX_CONTAINERS} objects and arrays, {MAX_STRINGS}"
        f" strings and {max_values} values.",
        code="body_too_complex",
    )


def _is_within(body: bytes, structure: bytes, max_values: int) -> bool:
    return (
        _count_containers(structure) <= MAX_CONTAINERS
        and structure.count(b",") < max_values
        and body.count(b'"') <= 2 * MAX_STRINGS
    )


def _count_containers(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{")


def _is_deeper(value: object, levels: int) -> bool:
    """Return whether the value nests deeper than `levels`. It is walked level by level, containers only."""
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
