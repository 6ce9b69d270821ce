"""The time limits of a request: its deadline, and the maximum time in the queue."""

import re
from typing import Literal

from msgspec import Struct
from starlette.datastructures import Headers

from tiercel.server.api.schemas.sampling import SamplingFields
from tiercel.server.client.collector import StreamEnd

Limit = Literal["timeout", "read_timeout", "request_timeout", "queue_timeout"]
"""The name of a time limit, as `/metrics` spells it."""

READ_TIMEOUT = "x-stainless-read-timeout"
DEADLINE_EXCEEDED = "deadline_exceeded"
QUEUE_TIMEOUT = "queue_timeout"

_ORIGINS: dict[Limit, str] = {
    "timeout": "the field timeout of its body",
    "read_timeout": f"its header {READ_TIMEOUT}",
    "request_timeout": "the request-timeout of this server",
}
_GRACE_S = 1.0
"""Seconds between the read timeout of an SDK and the end of its request here.

At the same time, the answer of the server would race with the timeout of the SDK, which then sees now the one and now
the other. The client is gone when the request ends here, unless a proxy holds its connection.
"""
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


class Deadline(Struct, frozen=True):
    """The time at which a request ends: answered or not, or only if it is still in the queue."""

    at_s: float  # on the clock of the server
    limit_s: float  # after its arrival
    limit: Limit
    keeps_text: bool = True  # a part of the answer is an answer; otherwise the request fails

    def end(self, drain_s: float) -> StreamEnd:
        """Return the end of a request without a token at this time; the queue is empty after `drain_s`.

        A retry after the deadline would come too late for the client.
        """
        if self.limit == "queue_timeout":
            message = f"The request waited for {self.limit_s:g} s, the longest time allowed. Please try again later."
            return StreamEnd(message, QUEUE_TIMEOUT, 503, retry_after_s=drain_s)
        message = f"The request was not answered within {self.limit_s:g} s, as {_ORIGINS[self.limit]} demands."
        return StreamEnd(message, DEADLINE_EXCEEDED, 504, retry_after_s=None)


def deadline_of(
    fields: SamplingFields, headers: Headers, request_timeout_s: float, arrival_s: float
) -> Deadline | None:
    """Return the earliest deadline of a request, or None if it has none.

    The read timeout of the SDKs bounds the silence of a connection. A whole answer is sent at once, so that the timeout
    bounds the time to its end; the comments of a quiet stream end the silence, so that it bounds nothing there.

    A stream that ends early has been read so far and says so at its end. A whole answer that was cut is returned only
    to a client that named the time in its body, also if another limit is the same time: other clients would take it for
    the answer.
    """
    limits: list[tuple[float, Limit]] = []
    if fields.timeout is not None:
        limits.append((fields.timeout, "timeout"))
    read_timeout_s = None if fields.stream else _seconds(headers.get(READ_TIMEOUT, ""))
    if read_timeout_s is not None:
        limits.append((read_timeout_s + _GRACE_S, "read_timeout"))
    if request_timeout_s > 0:
        limits.append((request_timeout_s, "request_timeout"))
    if not limits:
        return None
    limit_s, limit = min(limits, key=lambda one: (one[0], one[1] != "timeout"))
    return Deadline(arrival_s + limit_s, limit_s, limit, keeps_text=bool(fields.stream) or limit == "timeout")


def queue_limit_of(own_s: float | None, server_s: float, arrival_s: float) -> Deadline | None:
    """Return the time at which a request leaves the queue, by the limit of its tenant or else of the server."""
    limit_s = server_s if own_s is None else own_s
    return Deadline(arrival_s + limit_s, limit_s, "queue_timeout") if limit_s > 0 else None


def _seconds(text: str) -> float | None:
    """Return the seconds in a header of an SDK; None for anything else, because no client wrote it by hand."""
    return (float(text) or None) if _NUMBER.fullmatch(text) else None
