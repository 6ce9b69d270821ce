"""Limits of the size of schemas, and the options with which they are compiled."""

import pytest

from tiercel.server.grammar.constraint import (
    choice_constraint,
    lark_constraint,
    regex_constraint,
    schema_text_constraint,
)
from tiercel.server.grammar.lark import Tag, special, tagged
from tiercel.server.grammar.schema import WHITESPACE, prepared_schema
from tiercel.values.errors import AdmissionError


def _nest(levels: int) -> dict[str, object]:
    schema: dict[str, object] = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


ACCEPTED: list[dict[str, object]] = [
    _nest(32),
    {"enum": list(range(1024))},
    {"properties": {f"p{number}": {} for number in range(512)}},
    {"const": "x" * 60_000},
]
REFUSED: list[tuple[dict[str, object], str]] = [
    (_nest(33), "32 levels"),
    (_nest(5000), "32 levels"),
    ({"enum": list(range(1025))}, "1024 entries"),
    ({"items": {"enum": ["a"] * 1025}}, "1024 entries"),
    ({"properties": {f"p{number}": {} for number in range(513)}}, "512 properties"),
    ({"patternProperties": {f"p{number}": {} for number in range(513)}}, "512 patternProperties"),
    ({"const": "x" * 66_000}, "65536 letters"),
    ({"anyOf": [{"type": "string"}] * 10_000}, "65536 letters"),
    ({"minimum": 2**64}, "64 bits"),
    ({"minimum": float("nan")}, "finite"),
]


@pytest.mark.parametrize("schema", ACCEPTED)
def test_schemas_at_the_limits_are_accepted(schema: dict[str, object]) -> None:
    prepared = prepared_schema("guided_json", schema, is_strict=True).schema
    assert prepared["x-guidance"] == {"whitespace_pattern": WHITESPACE}


@pytest.mark.parametrize(("schema", "words"), REFUSED)
def test_schemas_beyond_the_limits_are_refused(schema: dict[str, object], words: str) -> None:
    with pytest.raises(AdmissionError, match=words) as refused:
        prepared_schema("structured_outputs.json", schema, is_strict=True)
    assert (refused.value.status, refused.value.param) == (400, "structured_outputs")


def test_options_of_the_client_are_replaced() -> None:
    schema = {"type": "string", "x-guidance": {"lenient": True}}
    assert prepared_schema("a", schema, is_strict=False).schema["x-guidance"] == {
        "whitespace_pattern": WHITESPACE,
        "lenient": True,
        "coerce_one_of": True,
    }
    for whitespace, options in (("", {"whitespace_flexible": False}), (" ?", {"whitespace_pattern": " ?"})):
        prepared = prepared_schema("a", schema, is_strict=True, whitespace=whitespace)
        assert prepared.schema["x-guidance"] == options
    with pytest.raises(AdmissionError, match="256 letters"):
        prepared_schema("a", schema, is_strict=True, whitespace=" " * 257)


def test_texts_have_limits_too() -> None:
    for make, words in (
        (lambda: regex_constraint("regex", "a" * 8193), "8192 letters"),
        (lambda: regex_constraint("regex", " "), "is empty"),
        (lambda: choice_constraint("guided_choice", ["a"] * 1025), "1024 choices"),
        (lambda: choice_constraint("guided_choice", [""]), "none of them empty"),
        (lambda: lark_constraint("tools", "x" * 70_000), "65536 letters"),
        (lambda: schema_text_constraint("guided_json", "{"), "is no JSON"),
        (lambda: schema_text_constraint("guided_json", "[" * 60_000), "is no JSON"),
        (lambda: schema_text_constraint("guided_json", "[]"), "must be an object"),
    ):
        with pytest.raises(AdmissionError, match=words):
            make()


def test_parts_that_have_no_spelling_are_refused() -> None:
    for token in ("<a b>", "x", "<[a]>", "<>"):
        with pytest.raises(ValueError, match=r"."):
            special(token)
    with pytest.raises(ValueError, match="begin"):
        tagged([Tag("<a>", "begin", '"x"')])


def test_unknown_keywords_displace_no_assertion_from_the_notes() -> None:
    unknown: dict[str, object] = {f"unknown{number}": 1 for number in range(40)}
    schema = {**unknown, "type": "object", "properties": {"a": {"not": {"type": "null"}}, "b": {"format": "phone"}}}
    notes = prepared_schema("a", schema, is_strict=False).notes
    assert notes.ignored[:3] == ("a.properties.a.not", "a.properties.b.format", "a.unknown0")
    assert notes.names(())[-1] == "26 more"
