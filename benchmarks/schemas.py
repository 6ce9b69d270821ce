"""JSON schemas whose valid documents have a bounded length, for benchmarks of structured output."""

_NAME = {"type": "string", "minLength": 1, "maxLength": 12}
_AGE = {"type": "integer", "minimum": 0, "maximum": 120}
_POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": -99, "maximum": 99}, "y": {"type": "boolean"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}


def _object(required: bool = True, **properties: object) -> dict[str, object]:
    names = list(properties) if required else []
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


SCHEMAS: dict[str, dict[str, object]] = {
    "boolean": {"type": "boolean"},
    "null_or_boolean": {"type": ["null", "boolean"]},
    "integer": {"type": "integer", "minimum": -50, "maximum": 12345},
    "exclusive": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 17},
    "multiple": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "text": {"type": "string", "minLength": 2, "maxLength": 20},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "enum": {"enum": ["red", "green", 3, None, True, {"a": [1]}]},
    "const": {"const": {"version": 2, "tags": ["a", "ü"]}},
    "person": _object(name=_NAME, age=_AGE),
    "optional": _object(required=False, name=_NAME, age=_AGE, point=_POINT),
    "nested": _object(who=_object(name=_NAME, home=_object(city=_NAME, code=_AGE)), point=_POINT),
    "array": {"type": "array", "items": _AGE, "minItems": 2, "maxItems": 6},
    "tuple": {
        "type": "array",
        "prefixItems": [_AGE, {"type": "boolean"}, {"enum": ["a", "b"]}],
        "items": False,
        "minItems": 3,
    },
    "objects": {"type": "array", "items": _POINT, "minItems": 1, "maxItems": 4},
    "union": {"anyOf": [_object(kind={"const": "name"}, name=_NAME), _object(kind={"const": "age"}, age=_AGE)]},
    "one_of": {"oneOf": [_object(kind={"const": "a"}, size=_AGE), _object(kind={"const": "b"}, word=_NAME)]},
    "all_of": {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 9}]},
    "references": {
        "$defs": {"point": _POINT, "line": _object(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"})},
        "$ref": "#/$defs/line",
    },
    "additional": {
        "type": "object",
        "properties": {"id": _AGE},
        "required": ["id"],
        "patternProperties": {"^x_[a-c]{1,2}$": {"type": "boolean"}},
        "additionalProperties": False,
        "maxProperties": 4,
    },
}
"""Schemas by name. Each output that ends is short, so that few end by `max_tokens`."""
