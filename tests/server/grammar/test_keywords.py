"""The table of keywords: every entry acts in what the compiler makes of it, and everything else is named."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from tiercel.server.grammar.constraint import schema_constraint
from tiercel.server.grammar.keywords import ACTING, ANNOTATIONS, FORMATS, IGNORED_ASSERTIONS, PARTLY_ACTING
from tiercel.server.grammar.schema import MAX_NOTED, prepared_schema
from tiercel.values.errors import AdmissionError

TOKENIZER = LLTokenizer("byte")
OBJECT = {"type": "object"}

# Keyword -> a schema in which it decides, a value that it allows and one that it excludes.
PROOFS: dict[str, tuple[dict[str, Any], str, str]] = {
    "$ref": ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}, "null", "1"),
    "additionalItems": ({"type": "array", "items": [{}], "additionalItems": {"type": "null"}}, "[1,null]", "[1,2]"),
    "additionalProperties": ({**OBJECT, "additionalProperties": {"type": "null"}}, '{"a":null}', '{"a":1}'),
    "allOf": ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, "7", "3"),
    "anyOf": ({"anyOf": [{"type": "null"}, {"type": "boolean"}]}, "true", "3"),
    "const": ({"const": {"a": [1]}}, '{"a":[1]}', '{"a":[2]}'),
    "enum": ({"enum": ["a", 5]}, "5", "6"),
    "exclusiveMaximum": ({"type": "integer", "exclusiveMaximum": 5}, "4", "5"),
    "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 5}, "6", "5"),
    "format": ({"type": "string", "format": "date"}, '"2024-02-29"', '"soon"'),
    "items": ({"type": "array", "items": {"type": "null"}}, "[null]", "[1]"),
    "maxItems": ({"type": "array", "maxItems": 1}, "[1]", "[1,2]"),
    "maxLength": ({"type": "string", "maxLength": 1}, '"a"', '"ab"'),
    "maxProperties": ({**OBJECT, "maxProperties": 1}, '{"a":1}', '{"a":1,"b":2}'),
    "maximum": ({"type": "integer", "maximum": 5}, "5", "6"),
    "minItems": ({"type": "array", "minItems": 1}, "[1]", "[]"),
    "minLength": ({"type": "string", "minLength": 2}, '"ab"', '"a"'),
    "minProperties": ({**OBJECT, "minProperties": 1}, '{"a":1}', "{}"),
    "minimum": ({"type": "integer", "minimum": 5}, "5", "4"),
    "multipleOf": ({"type": "integer", "multipleOf": 3}, "9", "8"),
    "oneOf": ({"oneOf": [{"type": "null"}, {"type": "boolean"}]}, "null", "1"),
    "pattern": ({"type": "string", "pattern": "^a+$"}, '"aa"', '"b"'),
    "patternProperties": ({**OBJECT, "patternProperties": {"^a": {"type": "null"}}}, '{"ab":null}', '{"ab":1}'),
    "prefixItems": ({"type": "array", "prefixItems": [{"type": "null"}]}, "[null,1]", "[1]"),
    "properties": ({**OBJECT, "properties": {"a": {"type": "null"}}}, '{"a":null}', '{"a":1}'),
    "required": ({**OBJECT, "required": ["a"]}, '{"a":1}', "{}"),
    "type": ({"type": ["boolean", "null"]}, "true", "1"),
}
FORMAT_PROOFS = {
    "date": ('"2024-02-29"', '"2024-13-01"'),
    "date-time": ('"2024-02-29T10:00:00Z"', '"2024-02-29"'),
    "duration": ('"P1D"', '"1 day"'),
    "email": ('"a@b.org"', '"a"'),
    "hostname": ('"a.org"', '"a b"'),
    "ipv4": ('"127.0.0.1"', '"300.0.0.1"'),
    "ipv6": ('"::1"', '"127.0.0.1"'),
    "time": ('"10:00:00Z"', '"10"'),
    "uri": ('"http://a/b"', '"a b"'),
    "uuid": ('"123e4567-e89b-12d3-a456-426614174000"', '"123"'),
}
NOT_ENFORCED: dict[str, Any] = {
    "$dynamicRef": "#a",
    "$recursiveRef": "#",
    "contains": {"type": "null"},
    "dependencies": {"a": ["b"]},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {"required": ["b"]}},
    "disallow": "string",
    "divisibleBy": 3,
    "else": {"type": "null"},
    "extends": {"type": "null"},
    "if": {"type": "null"},
    "maxContains": 3,
    "minContains": 3,
    "not": {"type": "null"},
    "propertyNames": {"maxLength": 3},
    "then": {"type": "null"},
    "unevaluatedItems": False,
    "unevaluatedProperties": False,
    "uniqueItems": True,
}
_COMPANIONS = {
    "if": {"then": {}},
    "then": {"if": {}},
    "else": {"if": {}},
    "minContains": {"contains": {}},
    "maxContains": {"contains": {}},
}


def _takes(schema: dict[str, Any], value: str, *, is_strict: bool = True) -> bool:
    constraint = schema_constraint("guided_json", schema, is_strict=is_strict, whitespace="")
    matcher = LLMatcher(TOKENIZER, constraint.text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(TOKENIZER.tokenize_str(value)) and matcher.is_accepting()


def test_every_keyword_of_the_table_is_proved() -> None:
    assert set(PROOFS) == set(ACTING)
    assert set(FORMAT_PROOFS) == FORMATS - {"unknown"}
    assert set(NOT_ENFORCED) == set(IGNORED_ASSERTIONS)
    assert not set(ACTING) & set(IGNORED_ASSERTIONS)
    assert not ANNOTATIONS & {*ACTING, *IGNORED_ASSERTIONS}
    assert set(ACTING) >= PARTLY_ACTING


@pytest.mark.parametrize("keyword", PROOFS)
@pytest.mark.parametrize("is_strict", [True, False])
def test_an_acting_keyword_excludes_what_it_says(keyword: str, is_strict: bool) -> None:
    schema, allowed, excluded = PROOFS[keyword]
    assert keyword in schema
    assert _takes(schema, allowed, is_strict=is_strict)
    assert not _takes(schema, excluded, is_strict=is_strict)
    rest = {name: value for name, value in schema.items() if name != keyword}
    assert _takes(rest, excluded, is_strict=is_strict)  # the keyword is what excludes it


@pytest.mark.parametrize("name", FORMAT_PROOFS)
def test_an_acting_format_excludes_what_it_says(name: str) -> None:
    allowed, excluded = FORMAT_PROOFS[name]
    assert _takes({"type": "string", "format": name}, allowed)
    assert not _takes({"type": "string", "format": name}, excluded)


DRAFTS = [
    *["http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-07/schema#", "no://draft"],
    *["https://json-schema.org/draft/2019-09/schema", "https://json-schema.org/draft/2020-12/schema"],
]


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_draft_that_a_schema_names_makes_no_keyword_idle(draft: str) -> None:
    for schema, allowed, excluded in PROOFS.values():
        assert _takes({"$schema": draft, **schema}, allowed), schema
        assert not _takes({"$schema": draft, **schema}, excluded), schema


@pytest.mark.parametrize("keyword", NOT_ENFORCED)
def test_an_assertion_that_does_not_act_is_named_or_refused(keyword: str) -> None:
    inner = {keyword: NOT_ENFORCED[keyword], **_COMPANIONS.get(keyword, {})}
    schema: dict[str, Any] = {**OBJECT, "properties": {"a": {"anyOf": [inner]}}}
    place = f"guided_json.properties.a.anyOf.0.{keyword}"
    assert place in prepared_schema("guided_json", schema, is_strict=False).notes.ignored
    with pytest.raises(AdmissionError) as refused:
        prepared_schema("guided_json", schema, is_strict=True)
    assert refused.value.status == 400
    if not inner.keys() - {keyword}:
        assert refused.value.message.startswith(f"{place}: ")
    assert "not enforced" in refused.value.message


def test_unknown_keywords_and_formats_are_named() -> None:
    schema = {"type": "string", "minlength": 5, "nullable": True, "format": "color", "items": {"frmat": 1}}
    notes = prepared_schema("guided_json", schema, is_strict=False).notes
    assert set(notes.ignored) == {f"guided_json.{name}" for name in ("minlength", "nullable", "format", "items.frmat")}
    assert prepared_schema("guided_json", {"minlength": 5}, is_strict=True).notes.ignored == ("guided_json.minlength",)
    with pytest.raises(AdmissionError, match=r"^guided_json.format: the format is not enforced; known are date, "):
        prepared_schema("guided_json", {"format": "color"}, is_strict=True)


def test_annotations_and_keywords_without_an_effect_are_not_named() -> None:
    schema = {name: "x" for name in ANNOTATIONS - {"$id", "$defs", "definitions", "contentSchema", "examples"}}
    idle = {"uniqueItems": False, "then": {"not": {}}, "if": {}, "unevaluatedProperties": True, "propertyNames": {},
            "dependentRequired": {}, "minContains": 2, "not": False, "x-order": 1}  # fmt: skip
    del idle["if"]
    notes = prepared_schema("guided_json", {**schema, **idle, "examples": [{"not": 1}]}, is_strict=True).notes
    assert notes.names(("oneOf",)) == ()


def test_parts_that_nothing_refers_to_are_not_named() -> None:
    schema = {"$defs": {"a": {"not": {}}, "b": {"uniqueItems": True}}, "properties": {"not": {"$ref": "#/$defs/b"}},
              "default": {"not": 1}}  # fmt: skip
    notes = prepared_schema("guided_json", schema, is_strict=False).notes
    assert notes.ignored == ("guided_json.$defs.b.uniqueItems",)


def test_names_are_bounded_and_fit_into_a_header() -> None:
    schema = {"properties": {f'é"\r\n, {number}' + "x" * 500: {"not": {}} for number in range(100)}}
    names = prepared_schema("guided_json", schema, is_strict=False).notes.names(())
    assert len(names) == MAX_NOTED + 1
    assert names[-1] == f"{100 - MAX_NOTED} more"
    assert all(name.isascii() and name.isprintable() and "," not in name and len(name) <= 200 for name in names)
    assert all(name.endswith(".not") for name in names[:-1])


def test_a_schema_is_passed_on_as_json() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}}
    text = schema_constraint("guided_json", schema).text
    assert list(json.loads(text)["grammars"][0]["json_schema"]["properties"]) == ["b", "a"]
