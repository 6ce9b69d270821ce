"""/openapi.json: the routes as FastAPI describes them, with the queries, bodies and answers of their contracts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, cast

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import Match
from starlette.types import Scope

from tiercel.server.api.contract import EVENTS, JSON, ApiRoute, Contract, QueryField, entry_type, members
from tiercel.server.api.narrowing import BodyLimits, narrowing
from tiercel.server.api.schemas.descriptions import FIELD_TEXTS
from tiercel.server.http.guarded_route import GuardedRoute, RouteGuard

_REF = "#/components/schemas/{}"
_SCHEME = "key"
_API_KEY = "x-api-key"
_OWN_PHRASES = {529: "Overloaded"}  # of statuses that HTTP does not have
_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")

Document = dict[str, Any]  # Any: a JSON document


class DocumentedApp(FastAPI):
    """A FastAPI application whose /openapi.json shows the contracts of its routes."""

    read_facts: Callable[[], BodyLimits] = BodyLimits  # the limits of bodies that the document shows
    _facts: BodyLimits | None = None  # that the document was made with

    def __init__(self, **options: Any) -> None:  # Any: the options of FastAPI
        super().__init__(**options)
        self._documented: list[tuple[str, ApiRoute]] = []  # with their tags

    def add(self, tag: str, routes: Iterable[ApiRoute], guard: RouteGuard | None) -> None:
        """Serve these routes behind a guard, and document them."""
        for route in routes:
            self.router.routes.append(GuardedRoute(route.path, route.handler, route.method, guard))
            self._documented.append((tag, route))

    @property
    def contracts(self) -> dict[tuple[str, str], Contract]:
        """The contracts by path and method, as the document writes these."""
        return {(_documented_path(route.path), route.method.lower()): route.contract for _, route in self._documented}

    @property
    def paths(self) -> list[str]:
        """The paths of the documented routes and of the page."""
        return [*dict.fromkeys(path for path, _ in self.contracts), "/ui"]

    def methods_of(self, scope: Scope) -> list[str]:
        """Return the methods that the path of a request has."""
        return [
            method
            for method in _METHODS
            if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in self.routes)
        ]

    def openapi(self) -> Document:
        """Return the document, which is made when it is first asked for, and again when a limit has changed."""
        facts = self.read_facts()
        if self.openapi_schema is None or facts != self._facts:
            self._facts = facts
            self.openapi_schema = _completed(self._described(), self.contracts, facts)
        return self.openapi_schema

    def _described(self) -> Document:
        """Return what FastAPI writes about the routes: their paths with parameters, names and docstrings."""
        routes = [
            APIRoute(route.path, route.handler, methods=[route.method], response_model=None, tags=[tag])
            for tag, route in self._documented
        ]
        return get_openapi(title=self.title, version=self.version, routes=routes)


def _documented_path(path: str) -> str:
    return path.replace(":path}", "}")


def _completed(document: Document, contracts: Mapping[tuple[str, str], Contract], facts: BodyLimits) -> Document:
    for (path, method), contract in contracts.items():
        operation = document["paths"][path][method]
        if contract.query:
            operation.setdefault("parameters", []).extend(map(_parameter, contract.query))
        if contract.bodies:
            content = {media_type: {"schema": _schema(contract.bodies)} for media_type in contract.body_types}
            operation["requestBody"] = {"required": True, "content": content}
        if 401 in contract.refusals:
            operation["security"] = [
                {_SCHEME: []},
                *([{_API_KEY: []}] if contract.takes_api_key else []),
                *([{}] if contract.is_open_locally else []),
            ]
        operation["responses"] = _responses(contract)
    components = document["components"] = document.get("components", {})
    components["schemas"] = _component_schemas(
        [kind for contract in contracts.values() for kind in contract.types], facts
    )
    components["securitySchemes"] = {
        _SCHEME: {"type": "http", "scheme": "bearer"},
        _API_KEY: {"type": "apiKey", "in": "header", "name": _API_KEY},
    }
    return document


def _parameter(field: QueryField) -> Document:
    return {"name": field.name, "in": "query", "required": False, "description": field.effect, "schema": field.schema}


def _responses(contract: Contract) -> Document:
    responses: Document = {
        str(status): {"description": _phrase(status), "content": {JSON: {"schema": _schema((kind,))}}}
        for status, kind in sorted(contract.all_answers.items())
    }
    if contract.events is not None:
        responses["200"]["content"][EVENTS] = {"schema": _schema((contract.events,))}
    if contract.text_type is not None:
        text = {contract.text_type: {"schema": {"type": "string"}}}
        responses = {"200": {"description": HTTPStatus.OK.phrase, "content": text}, **responses}
    return responses


def _phrase(status: int) -> str:
    return _OWN_PHRASES.get(status) or HTTPStatus(status).phrase


def _schema(kinds: Sequence[object]) -> Document:
    schemas = [_member_schema(kind) for union in kinds for kind in members(union)]
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _member_schema(kind: object) -> Document:
    if (entry := entry_type(kind)) is not None:
        return {"type": "array", "items": _member_schema(entry)}
    return {"$ref": _REF.format(kind.__name__)} if isinstance(kind, type) else {"type": "object"}


def _component_schemas(kinds: Sequence[object], facts: BodyLimits) -> Document:
    """Return the schemas of pydantic models (bodies) and msgspec structs (answers), with all that they refer to."""
    named = {kind for kind in kinds if isinstance(kind, type)}
    models = sorted((kind for kind in named if issubclass(kind, BaseModel)), key=lambda kind: kind.__name__)
    structs = sorted(named.difference(models), key=lambda kind: kind.__name__)
    _, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template=_REF.format("{model}")
    )
    for body, schema in cast(Document, definitions["$defs"]).items():
        for name, field in schema.get("properties", {}).items():
            text = FIELD_TEXTS.get(f"{body}.{name}", FIELD_TEXTS.get(name))
            if text is not None and "description" not in field:
                field["description"] = text
        if extra := narrowing(body, facts):
            schema["allOf"] = list(extra)
    _, components = msgspec.json.schema_components(structs, ref_template=_REF.format("{name}"))
    return {**cast(Document, definitions["$defs"]), **components}
