"""Pages of lists, as the OpenAI API has them: `limit`, `after` and `order`."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from starlette.requests import Request

from tiercel.errors import AdmissionError
from tiercel.server.api.contract import QueryField

T = TypeVar("T")


def page_query(*, default: int, most: int) -> tuple[QueryField, ...]:
    """Return the fields that `page_of` reads, for the contract of a route."""
    return (
        QueryField("after", {"type": "string"}, "The id of the object behind which the page begins."),
        QueryField(
            "limit",
            {"type": "integer", "minimum": 1, "maximum": most, "default": default},
            f"The most objects of the page; {default} without it.",
        ),
        QueryField(
            "order",
            {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
            "The newest objects first (`desc`, also without it), or the oldest.",
        ),
    )


def page_of(
    request: Request, records: Sequence[T], id_of: Callable[[T], str], *, default: int, most: int
) -> tuple[list[T], bool]:
    """Return the records that a request asks for, and whether there are more. `records` are the oldest first.

    `limit` is 1 to `most`. Errors: AdmissionError (400).
    """
    query = request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise AdmissionError(400, "order: expected asc or desc", param="order")
    limit = _limit(query.get("limit"), default, most)
    ordered = list(records) if order == "asc" else list(reversed(records))
    after = query.get("after")
    start = 0
    if after is not None:
        ids = [id_of(record) for record in ordered]
        if after not in ids:
            raise AdmissionError(400, "after: there is no object with this id", param="after")
        start = ids.index(after) + 1
    return ordered[start : start + limit], len(ordered) > start + limit


def _limit(text: str | None, default: int, most: int) -> int:
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= most:
        raise AdmissionError(400, f"limit: expected a whole number from 1 to {most}", param="limit")
    return int(text)
