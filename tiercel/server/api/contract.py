"""Contracts of routes: the types of bodies and answers, which check and are sent, and which /openapi.json shows."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Literal, cast, get_args, get_origin

from starlette.responses import Response

from tiercel.server.http.failure import FaultBody

JSON = "application/json"
EVENTS = "text/event-stream"
BODY_REFUSALS = (400, 408, 413, 415)
"""The refusals of a body: malformed or invalid, too slow, too large, in an encoding that is not decoded."""
KEY_REFUSALS = (401,)
"""The refusals of a route that needs a key."""
GENERATION_REFUSALS = (*BODY_REFUSALS, *KEY_REFUSALS, 404, 429, 500, 503, 504)


@dataclass(frozen=True, slots=True)
class QueryField:
    """A field that a route reads from the query of its address; none is required."""

    name: str
    schema: Mapping[str, object]  # JSON Schema of its values
    effect: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """The query, the body, the answers and the refusals of one route.

    `bodies` are alternatives, and so are the members of a union.

    A route whose refusals are not errors in OpenAI's shape lists them in `answers`.
    """

    query: tuple[QueryField, ...] = ()
    bodies: tuple[object, ...] = ()
    body_types: tuple[str, ...] = (JSON,)
    answers: Mapping[int, object] = field(default_factory=dict[int, object])  # status -> type of the JSON body
    events: object | None = None  # type of the events of a stream, the other form of answer 200
    text_type: str | None = None  # media type of an answer 200 that is not JSON
    refusals: tuple[int, ...] = ()
    is_open_locally: bool = False  # needs no key from this machine
    takes_api_key: bool = False  # the key may be in the header x-api-key

    @property
    def all_answers(self) -> dict[int, object]:
        """Every documented JSON body by status."""
        return {**dict.fromkeys(self.refusals, FaultBody), **self.answers}

    @property
    def types(self) -> tuple[object, ...]:
        """Every type that the document needs."""
        events = () if self.events is None else (self.events,)
        kinds = (*self.bodies, *self.all_answers.values(), *events)
        return tuple(entry_type(member) or member for kind in kinds for member in members(kind))


def members(kind: object) -> tuple[object, ...]:
    """Return the types of a union; of anything else, itself."""
    return cast(tuple[object, ...], get_args(kind)) if isinstance(kind, UnionType) else (kind,)


def entry_type(kind: object) -> object | None:
    """Return the type of the entries of a list; None for anything else."""
    return get_args(kind)[0] if get_origin(kind) is list else None


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """One method of one path."""

    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
    path: str
    handler: Callable[..., Awaitable[Response]]
    contract: Contract
