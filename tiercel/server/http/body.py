"""Request bodies: bytes to a checked JSON object, without blocking the event loop for a large one."""

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar, cast

import msgspec
from starlette.requests import ClientDisconnect, Request

from tiercel.server.http.body_budget import BodyHolding
from tiercel.server.http.body_fault import crowded_field, diagnosed, not_json, shown_name
from tiercel.server.http.byte_order import UTF8_MARK, wide_encoding
from tiercel.server.http.watch import ClientGoneError
from tiercel.values.errors import AdmissionError

MAX_DEPTH = 64
MAX_CONTAINERS = 16_384  # objects and arrays: more than 2,048 messages with 8,192 content parts need
MAX_STRINGS = 65_536  # names and values
_LARGE_BYTES = 64 * 1024  # more than this is decoded by a worker
_MAX_LETTER_BYTES = 4
_VALUE_BYTES = 40  # an integer, and its place in a list

T = TypeVar("T")


class InWorker(Protocol):
    """Runs work in a thread, off the event loop."""

    async def __call__(self, work: Callable[[], T]) -> T: ...


async def read_body(request: Request, holding: BodyHolding, limit_s: float) -> bytearray:
    """Read the body of a request in at most `limit_s`; `holding` counts it as it arrives.

    A byte order mark of UTF-8 is left out. Errors: AdmissionError (408 if it comes too slowly, 413 and 415 from the
    body limit, 400 if its encoding is wrong, 503 if there is no memory for it); ClientGoneError.
    """
    body = bytearray()
    try:
        with holding.displaceable():
            async with asyncio.timeout(limit_s):
                async for chunk in request.stream():  # `request.body()` would keep the bytes as long as the request
                    holding.grow(len(chunk))
                    body += chunk
    except TimeoutError as exc:
        raise AdmissionError(408, "The request body did not arrive in time.", code="request_timeout") from exc
    except ClientDisconnect as exc:
        raise ClientGoneError from exc
    if (encoding := wide_encoding(body)) is not None:
        raise AdmissionError(400, f"The body is {encoding}; send it as UTF-8.", code="invalid_encoding")
    if body.startswith(UTF8_MARK):
        del body[: len(UTF8_MARK)]
    return body


def check_json_type(request: Request) -> None:
    """Check the media type of a body. Errors: AdmissionError (400) if it is not that of JSON."""
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != "application/json":
        raise AdmissionError(400, "Unsupported Media Type: Only 'application/json' is allowed", code="invalid_json")


async def read_object(
    request: Request, in_worker: InWorker, holding: BodyHolding, *, max_values: int, limit_s: float
) -> dict[str, object]:
    """Read the body of a request as a JSON object of at most `max_values` values.

    `holding` counts the body, and from then on the object. Errors: AdmissionError (400 if it is not such an object, and
    those of `read_body`); ClientGoneError.
    """
    check_json_type(request)
    body = await read_body(request, holding, limit_s)
    object_bytes = decoded_bytes(body, max_values)
    holding.grow(object_bytes)
    if len(body) > _LARGE_BYTES:
        fields = await in_worker(lambda: parse_object(body, max_values=max_values))
    else:
        fields = parse_object(body, max_values=max_values)
    holding.resize(object_bytes)
    return fields


def decoded_bytes(body: bytes | bytearray, max_values: int) -> int:
    """Return an estimate of the memory of the values in a body, on the high side.

    Python keeps a text with four bytes for each character if one of them is outside the Basic Multilingual Plane.
    """
    letter_bytes = 1 if body.isascii() and b"\\u" not in body else _MAX_LETTER_BYTES
    return len(body) * letter_bytes + min(body.count(b","), max_values) * _VALUE_BYTES


def parse_object(body: bytes | bytearray, *, max_values: int) -> dict[str, object]:
    """Parse strict JSON, of at most MAX_DEPTH levels and no more parts than a request can have.

    NaN, lone surrogates and names that an object has twice are refused. Errors: AdmissionError (400).
    """
    _refuse_crowded(body, max_values)
    try:
        value: object = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        if isinstance(exc, msgspec.ValidationError):  # for any JSON value: a number that Python cannot hold
            raise diagnosed(body) from exc
        raise not_json() from exc
    if not isinstance(value, dict):
        raise AdmissionError(400, "The body must be a JSON object.", code="invalid_json")
    fields = cast(dict[str, object], value)
    if _count_containers(body) > MAX_DEPTH:
        for name, entry in fields.items():
            if isinstance(entry, list | dict) and _is_deeper(cast(object, entry), MAX_DEPTH - 1):
                shown = shown_name(name)
                raise AdmissionError(
                    400, f"{shown}: the body nests deeper than {MAX_DEPTH} levels.", code="invalid_json", param=shown
                )
    names = _count_names(fields)
    if body.count(b":") != names and _outside_strings(body).count(b":") != names:
        raise diagnosed(body)
    return fields


def _refuse_crowded(body: bytes | bytearray, max_values: int) -> None:
    """Refuse a body that would become millions of objects, before decoding it: decoding holds the interpreter lock.

    The whole body is counted first; only if that exceeds a limit, the text outside its strings is counted. For a body
    that is not JSON the counts are right up to the place where decoding fails.
    """
    if _is_within(body, body, max_values):
        return
    unescaped = _unescaped(body)
    if unescaped.count(b'"') <= 2 * MAX_STRINGS and _is_within(unescaped, _outside_strings(body), max_values):
        return
    name = crowded_field(body)
    raise AdmissionError(
        400,
        f"{'' if name is None else f'{name}: '}The body is too complex: a request can have at most {MAX_CONTAINERS}"
        f" objects and arrays, {MAX_STRINGS} strings and {max_values} values.",
        code="body_too_complex",
        param=name,
    )


def _unescaped(body: bytes | bytearray) -> bytes | bytearray:
    return body.replace(b"\\\\", b"").replace(b'\\"', b"")


def _outside_strings(body: bytes | bytearray) -> bytes:
    """Return the text of a body without its strings."""
    return b"".join(_unescaped(body).split(b'"')[::2])


def _count_names(fields: dict[str, object]) -> int:
    """Return the number of names in all objects."""
    count = 0
    level: list[object] = [fields]
    while level:
        count += sum(len(cast(dict[str, object], one)) for one in level if isinstance(one, dict))
        level = [entry for container in level for entry in _entries(container) if isinstance(entry, list | dict)]
    return count


def _is_within(body: bytes | bytearray, structure: bytes | bytearray, max_values: int) -> bool:
    return (
        _count_containers(structure) <= MAX_CONTAINERS
        and structure.count(b",") < max_values
        and body.count(b'"') <= 2 * MAX_STRINGS
    )


def _count_containers(body: bytes | bytearray) -> int:
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
