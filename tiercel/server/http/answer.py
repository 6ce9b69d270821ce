"""Whole answers as JSON."""

from collections.abc import Mapping

import msgspec
from msgspec import Struct
from starlette.responses import Response


def json_answer(
    body: Struct | Mapping[str, object], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a response with this body."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")
