"""The body of /v1/messages/batches. It may hold thousands of requests, which stay the text that they are.

Source: https://docs.claude.com/en/api/creating-message-batches.
"""

import re
from typing import Annotated

import msgspec
from msgspec import Raw, Struct
from pydantic import ConfigDict, Field

from tiercel.server.api.schemas.fields import Fields, Word
from tiercel.server.batch.line import MAX_LINES, BatchLine, one_line, wants_stream
from tiercel.server.batch.records import MESSAGES_ENDPOINT
from tiercel.values.errors import AdmissionError

_WORD = re.compile(r"[A-Za-z0-9_-]{1,64}")
_PLACE = re.compile(r"`\$((?:\.requests)?)(?:\[([0-9]+)\])?")
_OBJECT = "expected an object with the text custom_id, the object params, and nothing else"


class MessageBatchRequest(Fields):
    """One request of a batch."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    custom_id: Annotated[Word, Field(description="The name of the request in the results, given once.")]
    params: Annotated[
        dict[str, object],
        Field(description="The body of the request to /v1/messages, which is checked when it is answered."),
    ]


class MessageBatchFields(Fields):
    """The body of /v1/messages/batches."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests: Annotated[
        list[MessageBatchRequest], Field(min_length=1, max_length=MAX_LINES, description="The requests of the batch.")
    ]


class _Request(Struct, frozen=True, forbid_unknown_fields=True):
    custom_id: str
    params: Raw


class _Body(Struct, frozen=True, forbid_unknown_fields=True):
    requests: list[_Request]


_DECODER = msgspec.json.Decoder(_Body)


def max_requests(body: bytes | bytearray) -> int:
    """Return the largest number of requests that a body can hold: each has a comma in it, and one before the next."""
    return body.count(b",") // 2 + 1


def read_requests(body: bytes | bytearray) -> list[BatchLine]:
    """Return the requests of a body as lines of a batch. Errors: AdmissionError (400) naming the request."""
    try:
        body.decode()
        requests = _DECODER.decode(body).requests
    except msgspec.ValidationError as exc:
        raise _misshapen(str(exc)) from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise AdmissionError(400, "The body is not valid JSON.", code="invalid_json") from exc
    if not 1 <= len(requests) <= MAX_LINES:
        raise _refusal("requests", f"expected 1 to {MAX_LINES} requests, not {len(requests)}")
    lines: list[BatchLine] = []
    custom_ids: set[str] = set()
    for number, request in enumerate(requests):
        place, custom_id = f"requests.{number}", request.custom_id
        if _WORD.fullmatch(custom_id) is None:
            raise _refusal(f"{place}.custom_id", "expected 1 to 64 letters of A-Z, a-z, 0-9, _ and -")
        if custom_id in custom_ids:
            raise _refusal(f"{place}.custom_id", "another request of the batch has the same")
        custom_ids.add(custom_id)
        line = BatchLine(custom_id, "POST", MESSAGES_ENDPOINT, one_line(bytes(request.params)))
        if not bytes(line.body).startswith(b"{"):
            raise _refusal(f"{place}.params", "expected an object")
        if wants_stream(line):
            raise _refusal(f"{place}.params.stream", "a batch has no streams: leave stream out, or set it to false")
        lines.append(line)
    return lines


def _misshapen(message: str) -> AdmissionError:
    """Return the refusal of a body of another shape. Of the message of the decoder, only the place is used."""
    place = _PLACE.search(message)
    if place is not None and place[2] is not None:
        return _refusal(f"requests.{place[2]}", _OBJECT)
    if place is not None and place[1]:
        return _refusal("requests", "expected a list of objects with custom_id and params")
    return _refusal("requests", "the body must be an object with the list requests, and nothing else")


def _refusal(place: str, message: str) -> AdmissionError:
    return AdmissionError(400, f"{place}: {message}", code="invalid_value", param="requests")
