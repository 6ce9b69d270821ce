"""The time limits of a request: its deadline, and the maximum time in the queue."""

import re
from typing import Literal

from msgspec import Struct
from starlette.datastructures import Headers

from tiercel.server.api.schemas.sampling import SamplingFields
from tiercel.server.engine.mailbox import StreamEnd

Limit = Literal["timeout", "read_timeout", "request_timeout", "queue_timeout"]
"""The name of a time limit, as `/metrics` spells it."""

READ_TIMEOUT = "x-stainless-read-timeout"
DEADLINE_EXCEEDED = "deadline_exceeded"

_ORIGINS: dict[Limit, str] = {
    "timeout": "the field timeout of its body",
    "read_timeout": f"its header {READ_TIMEOUT}",
    "request_timeout": "the request-timeout of this server",
}
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


class Deadline(Struct, frozen=True):
    """The time at which a request ends, answered or not."""

    at_s: float  # on the clock of the server
    limit_s: float  # after its arrival
    limit: Limit

    @property
    def end(self) -> StreamEnd:
        """The end of a request that has no token at its deadline. A retry would come too late for the client."""
        message = f"The request was not answered within {self.limit_s:g} s, as {_ORIGINS[self.limit]} demands."
        return StreamEnd(message, DEADLINE_EXCEEDED, 504, retry_after_s=None)


def deadline_of(
    fields: SamplingFields, headers: Headers, request_timeout_s: float, arrival_s: float
) -> Deadline | None:
    """Return the earliest deadline of a request, or None if it has none.

    The read timeout of the SDKs bounds the silence of a connection. A whole answer is sent at once, so that the timeout
    bounds the time to its end; the comments of a quiet stream end the silence, so that it bounds nothing there.
    """
    limits: list[tuple[float, Limit]] = []
    if fields.timeout is not None:
        limits.append((fields.timeout, "timeout"))
    read_timeout_s = None if fields.stream else _seconds(headers.get(READ_TIMEOUT, ""))
    if read_timeout_s is not None:
        limits.append((read_timeout_s, "read_timeout"))
    if request_timeout_s > 0:
        limits.append((request_timeout_s, "request_timeout"))
    if not limits:
        return None
    limit_s, limit = min(limits)
    return Deadline(arrival_s + limit_s, limit_s, limit)


def _seconds(text: str) -> float | None:
    """Return the seconds in a header of an SDK; None for anything else, because no client wrote it by hand."""
    return (float(text) or None) if _NUMBER.fullmatch(text) else None
