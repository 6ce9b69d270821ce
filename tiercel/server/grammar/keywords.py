"""The keywords of JSON schemas: which of them act, and where the schemas in them stand.

`ACTING` is the one list of keywords that an output is held to. tests/server/grammar/test_keywords.py proves each entry:
no output can violate it.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Literal, cast

Value = Literal[
    "schema", "schemas", "named", "items", "count", "number", "limit", "text", "texts", "list", "type", "any"
]
"""What a keyword has as its value: a schema, a list or an object of schemas, or something without schemas."""

ACTING: Mapping[str, Value] = {
    "$ref": "text",
    "additionalItems": "schema",
    "additionalProperties": "schema",
    "allOf": "schemas",
    "anyOf": "schemas",
    "const": "any",
    "enum": "list",
    "exclusiveMaximum": "limit",
    "exclusiveMinimum": "limit",
    "format": "text",
    "items": "items",
    "maxItems": "count",
    "maxLength": "count",
    "maxProperties": "count",
    "maximum": "number",
    "minItems": "count",
    "minLength": "count",
    "minProperties": "count",
    "minimum": "number",
    "multipleOf": "number",
    "oneOf": "schemas",
    "pattern": "text",
    "patternProperties": "named",
    "prefixItems": "schemas",
    "properties": "named",
    "required": "texts",
    "type": "type",
}

FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
)
"""The values of `format` that act; `unknown` is any text."""

PARTLY_ACTING: frozenset[str] = frozenset({"maxProperties", "minProperties", "oneOf"})
"""Keywords that act in most schemas. The compiler tells where they do not: `oneOf` whose branches may overlap is read
as `anyOf`, and limits of the number of properties need all the properties that are named to be required."""

IGNORED_ASSERTIONS: Mapping[str, Value] = {
    "$dynamicRef": "text",
    "$recursiveRef": "text",
    "contains": "schema",
    "dependencies": "named",
    "dependentRequired": "any",
    "dependentSchemas": "named",
    "disallow": "any",
    "divisibleBy": "number",
    "else": "schema",
    "extends": "any",
    "if": "schema",
    "maxContains": "count",
    "minContains": "count",
    "not": "schema",
    "propertyNames": "schema",
    "then": "schema",
    "unevaluatedItems": "schema",
    "unevaluatedProperties": "schema",
    "uniqueItems": "any",
}
"""Keywords of JSON Schema that exclude values and that no output is held to. `strict` refuses them."""

ANNOTATIONS = frozenset(
    {
        *("$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$recursiveAnchor", "$schema", "$vocabulary"),
        *("contentEncoding", "contentMediaType", "contentSchema", "default", "definitions", "deprecated"),
        *("description", "example", "examples", "id", "readOnly", "title", "writeOnly", "x-guidance"),
    }
)
"""Keywords that exclude nothing. All other names, `ACTING` and `IGNORED_ASSERTIONS` aside, are unknown."""

_DEFINITIONS: Mapping[str, Value] = {"$defs": "named", "definitions": "named", "contentSchema": "schema"}
_SHAPES: Mapping[str, Value] = {**ACTING, **IGNORED_ASSERTIONS, **_DEFINITIONS}
_MEANS_NULL = frozenset({"const", "default", "example", "examples"})
_NEEDS = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}

Place = tuple[str | int, ...]
"""A place in a schema: the names and numbers that lead there from its top."""


_ANYTHING: dict[str, object] = {}  # the schema of any value


def copied_schema(schema: Mapping[str, object]) -> dict[str, object]:
    """Return a copy in which null is as absent, wherever a keyword has it: bridges to tools send such schemas.

    Keywords without an effect (`uniqueItems: false`, `then` without `if`) are left out, too. Cost: linear; the schema
    is at most `MAX_SCHEMA_DEPTH` deep.
    """
    made: dict[str, object] = {}
    for keyword, value in schema.items():
        if (value is None and keyword not in _MEANS_NULL) or _has_no_effect(keyword, value, schema):
            continue
        made[keyword] = _copied_value(_SHAPES.get(keyword), value)
    return made


def _copied_value(shape: Value | None, value: object) -> object:
    unchanged = value
    if isinstance(value, dict):
        entries = cast(dict[str, object], value)
        if shape in ("schema", "items"):
            return copied_schema(entries)
        if shape == "named":
            return {name: _copied_value("schema", _ANYTHING if one is None else one) for name, one in entries.items()}
    elif isinstance(value, list) and shape in ("schemas", "items"):
        return [_copied_value("schema", one) for one in cast(list[object], value) if one is not None]
    return deepcopy(unchanged)  # a `$ref` may name a schema in it


def _has_no_effect(keyword: str, value: object, schema: Mapping[str, object]) -> bool:
    if keyword in IGNORED_ASSERTIONS:
        needed = _NEEDS.get(keyword)
        if needed is not None:
            return schema.get(needed) is None
        if keyword == "if":
            return schema.get("then") is None and schema.get("else") is None
        if keyword in ("not", "uniqueItems"):
            return value is False
        return keyword != "contains" and (value is True or value in ({}, []))
    return False


def inner_schemas(schema: Mapping[str, object], *, acting: bool = False) -> Iterator[tuple[Place, object]]:
    """Yield the schemas within a schema, each with its place in it; with `acting`, only those in acting keywords."""
    shapes = ACTING if acting else _SHAPES
    for keyword, value in schema.items():
        shape = shapes.get(keyword)
        if isinstance(value, dict) and shape == "named":
            for name, one in cast(dict[str, object], value).items():
                yield (keyword, name), one
        elif isinstance(value, list) and shape in ("schemas", "items"):
            for number, one in enumerate(cast(list[object], value)):
                yield (keyword, number), one
        elif shape in ("schema", "items"):
            yield (keyword,), value


def fault_of(keyword: str, value: object) -> str:
    """Return what is wrong with the value of an acting keyword; "" if nothing is."""
    match ACTING[keyword]:
        case "schemas":
            return "" if isinstance(value, list) else "must be a list of schemas"
        case "named":
            return "" if isinstance(value, dict) else "must be an object of schemas"
        case "count":
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            return "" if is_count else "must be an integer from 0"
        case "number":
            return "" if _is_number(value) else "must be a number"
        case "limit":  # a boolean in draft 4
            return "" if _is_number(value) or isinstance(value, bool) else "must be a number"
        case "text":
            return "" if isinstance(value, str) else "must be a text"
        case "texts":
            return "" if _are_texts(value) else "must be a list of texts"
        case "list":
            return "" if isinstance(value, list) else "must be a list"
        case "type":
            return _fault_of_types(value)
        case "schema" | "items" | "any":
            return ""


TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")
"""The values of `type`."""


def _fault_of_types(value: object) -> str:
    types = cast(list[object], value) if isinstance(value, list) else [value]
    is_right = bool(types) and all(one in TYPES for one in types if isinstance(one, str))
    if is_right and all(isinstance(one, str) for one in types):
        return ""
    return f"must be one or several of {', '.join(TYPES)}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in cast(list[object], value))
