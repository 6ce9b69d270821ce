"""Hostile constraints of requests: generated ones, each the fields of a body."""

import copy
import json
import random
from collections.abc import Callable
from typing import cast

_ODD: list[object] = [
    *[None, True, False, 0, -1, 0.5, 1e308, -1e308, 2**31, 2**63, 2**64, 10**40, 10**300, float("nan"), float("inf")],
    *[
        "",
        "x",
        "string",
        "object",
        "null",
        "\u0000",
        "\ud800",
        "\u2028",
        "#",
        "#/",
        "#/$defs/a",
        "http://[::1",
        "a" * 4000,
    ],
    *[[], {}, [[]], [{}], [None], ["a", 5, None], {"type": "object"}, {"$ref": "#"}, {"enum": []}, ["string", "null"]],
]
_KEYWORDS = [
    *["type", "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "items", "enum"],
    *["prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "minLength", "maxLength", "pattern", "format"],
    *["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "anyOf", "oneOf", "allOf"],
    *["not", "if", "then", "else", "$ref", "$defs", "definitions", "$id", "$anchor", "$dynamicRef", "$schema"],
    *["minProperties", "maxProperties", "dependentRequired", "x-guidance", "unevaluatedProperties", "title", "\u0000"],
]
_PATTERNS = [
    *[
        "(a+)+$",
        "^(a|a)*$",
        "(a|b)*a(a|b){200}",
        "(([a-z]{1,200}){1,200}){1,200}",
        "((((((x?){50}){50}){50}){50}){50})",
    ],
    *[
        "(?=a)b",
        "(a)\\1",
        "[",
        "(",
        "*",
        "\\",
        "(?P<a",
        "(?i)straße",
        "\\p{L}{1,5000}",
        "[^\\s\\S]",
        "\\d{1000}",
        "^$",
        "",
    ],
    *[
        "(.*a.*b.*c.*d.*e.*f.*){9}",
        "a{100000}",
        "a{0,4294967296}",
        "a{5,3}",
        "\ud800",
        "\\x{110000}",
        "(?s).*",
        "[a-\\d]",
    ],
    *["(" * 3000 + "a" + ")" * 3000, "|".join(f"{a:x}{a * 7919:x}.*" for a in range(800)), "(a?){500}a{500}"],
]
_GRAMMARS = [
    *[
        "",
        "start",
        "start: start",
        "start: a\na: b\nb: a",
        'start: e\ne: e e | "a" | ""',
        "start: /(/",
        "root ::= root",
    ],
    *[
        "start: <[99999999]>",
        "start: <[*]>",
        "start: <|nothing|>",
        "start: @missing",
        "start: x{1,100000}\nx: y{1,100000}\ny: /a/",
    ],
    *[
        "start: " + "(" * 5000 + '"a"' + ")" * 5000,
        "root ::= " + "(" * 5000,
        'start: %json {"$ref": "#"}',
        "start: %json {",
        "%import a.B",
    ],
    *["\n".join(["start: r0", *(f"r{n}: r{n + 1} r{n + 1}" for n in range(200)), 'r200: "a"'])],
    *[
        "\n".join(["start: A0", *(f"A{n}: A{n + 1} A{n + 1}" for n in range(60)), "A60: /a/"]),
        "start: \u0000",
        "start: \ud800",
    ],
    *['start: %regex {"substring_chars": "' + "abc" * 5000 + '"}', "start: /a/ & ~/a/", "start: A\nA: /.*/ & ~/.*/"],
]


def _nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    for level in range(depth):
        schema = {"type": "array", "items": schema} if level % 2 else {"type": "object", "properties": {"a": schema}}
    return schema


def _text(rng: random.Random, letters: int) -> str:
    return "".join(chr(rng.choice((97, 98, 34, 92, 0xE9, 0x4E2D, 0x1F642))) for _ in range(letters))


def _bomb(rng: random.Random) -> dict[str, object]:
    """Return a schema that is large, deep, or expensive to compile."""
    size = rng.choice((3, 40, 300, 500, 2000))
    schemas: list[Callable[[], dict[str, object]]] = [
        lambda: _nested(rng.choice((5, 15, 31, 33, 60))),
        lambda: {"enum": [_text(rng, rng.choice((1, 8, 60))) + str(one) for one in range(size)]},
        lambda: {"type": "object", "properties": {f"p{one}": {"type": "string"} for one in range(size)}},
        lambda: {
            "type": "object",
            "properties": {f"p{one}": _nested(rng.randrange(4)) for one in range(size)},
            "required": [f"p{one}" for one in range(0, size, 2)],
            "additionalProperties": False,
        },
        lambda: {"type": "object", "patternProperties": {f"^a{{{one}}}": {"type": "null"} for one in range(size)}},
        lambda: {"type": "object", "patternProperties": {rng.choice(_PATTERNS): {} for _ in range(4)}},
        lambda: {"type": "string", "pattern": rng.choice(_PATTERNS)},
        lambda: {"type": "string", "minLength": rng.choice((10**4, 10**6, 2**31)), "maxLength": 10**7},
        lambda: {"type": "array", "items": {"type": "integer"}, "minItems": rng.choice((900, 10**5, 2**40))},
        lambda: {"type": "number", "multipleOf": rng.choice((1e-9, 7919, 0, -3)), "minimum": -(10**15)},
        lambda: {"allOf": [{"type": "string", "pattern": f"a{{{one}}}"} for one in range(size % 50)]},
        lambda: {"anyOf": [{"type": "object", "properties": {f"k{one}": {"const": one}}} for one in range(size)]},
        lambda: {"oneOf": [{"type": "object", "properties": {"k": {"const": one}}} for one in range(size % 90)]},
        lambda: {"$ref": rng.choice(("#", "#/a", "http://127.0.0.1:9/x", "file:///etc/passwd", "//x", "\u0000"))},
        lambda: {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}},
                 "$ref": "#/$defs/b"},
        lambda: {
            "$defs": {
                f"d{one}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{one + 1}"}] * 2, "minItems": 2}
                for one in range(30)
            }
            | {"d30": {"const": 1}},
            "$ref": "#/$defs/d0",
        },
        lambda: {"allOf": [{"$ref": f"#/allOf/{(one + 1) % 9}"} for one in range(9)]},
        lambda: {"const": {"a": [_text(rng, size)] * 3, "\u0000": 1e300}},
        lambda: {"type": ["string", "null", "banana", 5]},
        lambda: {"x-guidance": {"whitespace_pattern": rng.choice(_PATTERNS), "lenient": rng.choice(_ODD)}},
    ]  # fmt: skip
    return rng.choice(schemas)()


def _spoiled(rng: random.Random, schema: dict[str, object]) -> dict[str, object]:
    """Put odd values at a few random places of a schema."""
    schema = copy.deepcopy(schema)
    for _ in range(rng.choice((0, 0, 1, 2, 4))):
        place = schema
        while rng.random() < 0.7:
            inner = [one for one in place.values() if isinstance(one, dict)]
            if not inner:
                break
            place = cast(dict[str, object], rng.choice(inner))
        place[rng.choice(_KEYWORDS)] = copy.deepcopy(rng.choice((*_ODD, _bomb(rng))))  # it may be spoiled itself
    return schema


def hostile_fields(rng: random.Random) -> dict[str, object]:
    """Return fields of a body that constrain an output."""
    schema = _spoiled(rng, _bomb(rng))
    values: list[Callable[[], dict[str, object]]] = [
        lambda: {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
        lambda: {
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
        },
        lambda: {"guided_json": schema, "guided_whitespace_pattern": rng.choice(_PATTERNS)},
        lambda: {"structured_outputs": {"json": json.dumps(schema)}},
        lambda: {"regex": rng.choice(_PATTERNS)},
        lambda: {"structured_outputs": {"grammar": rng.choice(_GRAMMARS)}},
        lambda: {"guided_choice": [_text(rng, rng.randrange(9)) for _ in range(rng.choice((0, 1, 30, 1024, 1025)))]},
        lambda: {
            rng.choice(("guided_json", "structured_outputs", "response_format", "regex", "ebnf")): rng.choice(_ODD)
        },
    ]
    return rng.choices(values, weights=(6, 6, 3, 3, 3, 3, 1, 1))[0]()
