"""Pages of lists, as the OpenAI API has them: `limit`, `after` and `order`."""

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from starlette.requests import Request

from tiercel.server.api.contract import QueryField
from tiercel.values.errors import AdmissionError

T = TypeVar("T")

_ID = {"type": "string", "minLength": 1}


Order = Literal["asc", "desc"]


def page_query(*, default: int, most: int, least: int = 1, order: Order = "desc") -> tuple[QueryField, ...]:
    """Return the fields that `page_of` reads, for the contract of a route. `order` is that without the field."""
    return (
        QueryField("after", _ID, "The id of the object behind which the page begins."),
        QueryField(
            "limit",
            {"type": "integer", "minimum": least, "maximum": most, "default": default},
            f"The most objects of the page; {default} without it.",
        ),
        QueryField(
            "order",
            {"type": "string", "enum": ["asc", "desc"], "default": order},
            f"The newest objects first (`desc`), or the oldest (`asc`); `{order}` without it.",
        ),
    )


def page_of(
    request: Request,
    records: Sequence[T],
    id_of: Callable[[T], str],
    *,
    default: int,
    most: int,
    least: int = 1,
    order: Order = "desc",
) -> tuple[list[T], bool]:
    """Return the records that a request asks for, and whether there are more. `records` are the oldest first.

    `limit` is `least` to `most`. Errors: AdmissionError (400).
    """
    query = request.query_params
    wanted = query.get("order", order)
    if wanted not in ("asc", "desc"):
        raise AdmissionError(400, "order: expected asc or desc", param="order")
    limit = _limit(query.get("limit"), default, least, most)
    ordered = list(records) if wanted == "asc" else list(reversed(records))
    after = query.get("after")
    start = 0
    if after is not None:
        ids = [id_of(record) for record in ordered]
        if after not in ids:
            raise AdmissionError(400, "after: there is no object with this id", param="after")
        start = ids.index(after) + 1
    return ordered[start : start + limit], len(ordered) > start + limit


def message_page_query(*, default: int, most: int) -> tuple[QueryField, ...]:
    """Return the fields that `message_page_of` reads, for the contract of a route."""
    return (
        QueryField("before_id", _ID, "The id of the object before which the page ends."),
        QueryField("after_id", _ID, "The id of the object behind which the page begins."),
        QueryField(
            "limit",
            {"type": "integer", "minimum": 1, "maximum": most, "default": default},
            f"The most objects of the page; {default} without it.",
        ),
    )


def message_page_of(
    request: Request, records: Sequence[T], id_of: Callable[[T], str], *, default: int, most: int
) -> tuple[list[T], bool]:
    """Return the records that a request asks for in Anthropic's way, the newest first, and whether there are more in
    the direction in which the client goes. `records` are the oldest first. Errors: AdmissionError (400).
    """
    query = request.query_params
    limit = _limit(query.get("limit"), default, 1, most)
    ordered = list(reversed(records))
    ids = [id_of(record) for record in ordered]
    before, after = query.get("before_id"), query.get("after_id")
    if before is not None and after is not None:
        raise AdmissionError(400, "before_id, after_id: only one of them can be given", param="before_id")
    for name, id in (("before_id", before), ("after_id", after)):
        if id is not None and id not in ids:
            raise AdmissionError(400, f"{name}: there is no object with this id", param=name)
    if before is not None:
        end = ids.index(before)
        return ordered[max(end - limit, 0) : end], end > limit
    start = 0 if after is None else ids.index(after) + 1
    return ordered[start : start + limit], len(ordered) > start + limit


def _limit(text: str | None, default: int, least: int, most: int) -> int:
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or not least <= int(text) <= most:
        raise AdmissionError(400, f"limit: expected a whole number from {least} to {most}", param="limit")
    return int(text)
