"""The proof that a schema has an instance of finite length, and null as absent."""

import random
from collections import Counter
from copy import deepcopy
from typing import Any, cast

import pytest

from tests.seeds import fast_and_slow, fresh_seeds
from tiercel.server.grammar.keywords import copied_schema
from tiercel.server.grammar.pointer import pointer
from tiercel.server.grammar.schema import prepared_schema
from tiercel.server.grammar.schema_graph import MAX_POINTER_LETTERS, SchemaFaultError, SchemaGraph
from tiercel.values.errors import AdmissionError

Schema = dict[str, Any]

A: Schema = {"$ref": "#/$defs/a"}
B: Schema = {"$ref": "#/$defs/b"}
TOP: Schema = {"$ref": "#"}
NULL: Schema = {"type": "null"}


def holding(schema: object, *others: str) -> Schema:
    """Return a schema of objects that must have the property x, which is of another schema."""
    return {"type": "object", "properties": {"x": schema}, "required": ["x", *others]}


def with_definitions(schema: Schema, **definitions: object) -> Schema:
    return {**schema, "$defs": definitions}


CIRCULAR: list[tuple[Schema, str]] = [
    (TOP, "$ref"),
    (with_definitions(A, a=B, b=A), "$defs.b.$ref"),
    (with_definitions({"properties": {"pad": {"const": "z" * 300}, **holding(A)["properties"]},
                       "type": "object", "required": ["pad", "x"]}, a=B, b=A), "$defs.b.$ref"),
    (holding(TOP), "properties.x.$ref"),
    (with_definitions(holding(A), a=holding(A)), "$defs.a.properties.x.$ref"),
    ({"type": "array", "items": TOP, "minItems": 1}, "items.$ref"),
    ({"type": "array", "prefixItems": [NULL, TOP], "minItems": 2}, "prefixItems.1.$ref"),
    ({"type": "array", "items": [TOP], "minItems": 1}, "items.0.$ref"),
    ({"type": "array", "items": [NULL], "additionalItems": TOP, "minItems": 2}, "additionalItems.$ref"),
    ({"type": "object", "additionalProperties": TOP, "required": ["any"]}, "additionalProperties.$ref"),
    ({"anyOf": [TOP, holding(TOP)]}, "anyOf.0.$ref"),
    ({"oneOf": [TOP]}, "oneOf.0.$ref"),
    ({"allOf": [NULL, TOP]}, "allOf.1.$ref"),
    ({"type": "object", "properties": {"y": TOP}, "required": ["x"], "dependentRequired": {"x": ["y"]}},
     "properties.y.$ref"),
    ({"definitions": {"a": {"$ref": "#/definitions/a"}}, "$ref": "#/definitions/a"}, "definitions.a.$ref"),
    ({"$defs": {"a": {"$anchor": "here", "$ref": "#here"}}, "$ref": "#here"}, "$defs.a.$ref"),
    ({"$id": "http://host/top", "$defs": {"a": {"$id": "inner", "$ref": "inner"}}, "$ref": "inner"}, "$defs.a.$ref"),
    ({"$defs": {"a/b ~%": {"$ref": "#/$defs/a~1b%20~0%25"}}, "$ref": "#/$defs/a~1b%20~0%25"}, "$defs.a/b ~%.$ref"),
    (holding({"properties": {"deep": holding({"$ref": "#/properties/x/properties/deep"})}, "type": "object",
              "required": ["deep"]}), "properties.x.properties.deep.properties.x.$ref"),
    ({"type": ["object", "array"], **{k: v for k, v in holding(TOP).items() if k != "type"}, "items": TOP,
      "minItems": 1}, "properties.x.$ref"),
]  # fmt: skip
EMPTY: list[tuple[Schema, str, str]] = [
    ({"type": "string", "minLength": 5, "maxLength": 3}, "minLength", "larger than maxLength"),
    ({"type": "array", "minItems": 2, "maxItems": 1}, "minItems", "larger than maxItems"),
    ({"type": "object", "minProperties": 2, "maxProperties": 1}, "minProperties", "larger than maxProperties"),
    ({"type": "object", "required": ["a", "b"], "maxProperties": 1}, "maxProperties", "2 properties are required"),
    ({"type": "integer", "minimum": 2, "maximum": 1}, "minimum", "larger than maximum"),
    ({"enum": []}, "enum", "the list is empty"),
    ({"anyOf": []}, "anyOf", "the list is empty"),
    ({"enum": [1, True], "type": "string"}, "enum", "no value has the type"),
    ({"const": 1, "type": "string"}, "const", "no value has the type"),
    ({"const": 1, "enum": [True]}, "const", "not one of the values"),
    (holding(False), "properties.x", "the schema false"),
    ({"type": "object", "required": ["x"], "additionalProperties": False}, "additionalProperties", "schema false"),
    (with_definitions(holding(A), a={"enum": []}), "$defs.a.enum", "the list is empty"),
    ({"allOf": [{"anyOf": [False, {"enum": []}]}]}, "allOf.0.anyOf.0", "the schema false"),
]
WITH_END: list[Schema] = [
    {"type": "object", "properties": {"next": TOP}},
    {"type": "array", "items": TOP},
    {"anyOf": [TOP, NULL]},
    {"type": "object", "properties": {"next": {"anyOf": [TOP, NULL]}}, "required": ["next"]},
    {"type": ["object", "null"], "properties": {"x": TOP}, "required": ["x"]},
    {"properties": {"x": TOP}, "required": ["x"]},  # no type: null is valid
    with_definitions({"type": "object", "properties": {"x": A}}, a=A),  # x cannot be there
    with_definitions(NULL, a=A, b={"$ref": "http://host/elsewhere"}, c={"type": 5}),  # nothing of it is used
    {"type": "object", "patternProperties": {"^x": TOP}, "required": ["x"], "additionalProperties": False}
    | {"patternProperties": {"^x": NULL}},
]


def refusal_of(schema: Schema) -> str:
    with pytest.raises(AdmissionError) as refused:
        prepared_schema("response_format", schema, is_strict=False, path="response_format.json_schema.schema")
    assert (refused.value.status, refused.value.param) == (400, "response_format")
    return refused.value.message


@pytest.mark.parametrize(("schema", "place"), CIRCULAR)
def test_a_ref_that_leads_back_to_itself_is_refused_and_named(schema: Schema, place: str) -> None:
    assert refusal_of(schema).startswith(f"response_format.json_schema.schema.{place}: the $ref leads back to itself")


@pytest.mark.parametrize(("schema", "place", "words"), EMPTY)
def test_a_schema_without_values_is_refused_and_named(schema: Schema, place: str, words: str) -> None:
    message = refusal_of(schema)
    assert message.startswith(f"response_format.json_schema.schema.{place}: ")
    assert words in message


@pytest.mark.parametrize("schema", WITH_END)
def test_a_schema_with_an_end_is_accepted(schema: Schema) -> None:
    prepared_schema("a", schema, is_strict=True)


@pytest.mark.parametrize(
    ("reference", "words"),
    [("http://host/a", "out of the schema"), ("file:///etc/passwd", "out of the schema"), ("//[", "out of the schema"),
     ("#/$defs/none", "place that the schema does not have"), ("#/required/7", "place that the schema"),
     ("#none", "$anchor"), ("other.json#/a", "out of the schema")],
)  # fmt: skip
def test_a_ref_to_nothing_is_refused_and_named(reference: str, words: str) -> None:
    message = refusal_of(holding({"$ref": reference}))
    assert message.startswith("response_format.json_schema.schema.properties.x.$ref: ")
    assert words in message


@pytest.mark.parametrize(
    ("schema", "place"),
    [({"properties": 5}, "properties"), ({"required": "a"}, "required"), ({"type": "banana"}, "type"),
     ({"items": 5}, "items"), ({"anyOf": {}}, "anyOf"), ({"enum": 5}, "enum"), ({"pattern": 5}, "pattern"),
     ({"minLength": -1}, "minLength"), ({"maximum": "5"}, "maximum"), ({"$ref": 5}, "$ref"), ({"type": []}, "type"),
     ({"type": [None]}, "type"), ({"properties": {"a": {"minItems": True}}}, "properties.a.minItems")],
)  # fmt: skip
def test_a_value_that_a_keyword_cannot_have_is_refused_and_named(schema: Schema, place: str) -> None:
    assert refusal_of(schema).startswith(f"response_format.json_schema.schema.{place}: ")


KEYWORDS = [
    *["$ref", "$id", "$anchor", "$defs", "type", "properties", "required", "items", "prefixItems", "enum", "pattern"],
    *["additionalProperties", "patternProperties", "anyOf", "oneOf", "allOf", "minLength", "maximum", "format", "not"],
    *["if", "uniqueItems", "contains", "dependentRequired", "propertyNames", "title", "description", "minItems"],
]


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_null_is_as_absent(keyword: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {keyword: None}}}, keyword: None}
    expected = {"type": "object", "properties": {"a": {"type": "array", "items": {}}}}
    expected = {name: value for name, value in expected.items() if name != keyword}
    assert copied_schema(schema) == expected
    prepared_schema("tools", schema, is_strict=True)


def test_null_is_a_value_where_json_schema_has_values() -> None:
    schema: Schema = {"const": None, "default": None, "anyOf": [None, {"enum": [None, 1]}]}
    assert copied_schema(schema) == {"const": None, "default": None, "anyOf": [{"enum": [None, 1]}]}
    assert copied_schema({"properties": {"a": None}}) == {"properties": {"a": {}}}


def test_the_schema_of_the_client_is_not_changed() -> None:
    schema = with_definitions({"type": "object", "properties": {"x": A}, "$id": "http://host/a"}, a=A)
    before = copied_schema(schema)
    prepared_schema("a", schema, is_strict=True)
    assert schema == before


def test_a_ref_is_written_as_it_was_resolved() -> None:
    """So that the compiler cannot resolve it in another way."""
    schema = {
        "$id": "http://host/top",
        "$defs": {"a b": {"$anchor": "here", "type": "null"}, "c": {"$id": "inner", "$ref": "#/$defs/d",
                                                                  "$defs": {"d": {"type": "string"}}}},
        "anyOf": [{"$ref": "#here"}, {"$ref": "inner"}, {"$ref": "http://host/inner#/$defs/d"}],
    }  # fmt: skip
    made = prepared_schema("a", schema, is_strict=True).schema
    places = [("$defs", "a b"), ("$defs", "c"), ("$defs", "c", "$defs", "d")]
    assert made["anyOf"] == [{"$ref": pointer(place)} for place in places]
    assert "$id" not in str(made)
    assert "$anchor" not in str(made)


def _random_schema(rng: random.Random, depth: int) -> Schema:
    if depth == 0 or rng.random() < 0.25:
        return rng.choice([{"$ref": f"#/$defs/{rng.choice('abc')}"}, {"$ref": f"#/$defs/{rng.choice('abc')}"}, NULL])
    inner = lambda: _random_schema(rng, depth - 1)  # noqa: E731
    return rng.choice([
        lambda: {"type": "object", "properties": {"x": inner()}, "required": rng.choice([["x"], []]),
                 "additionalProperties": False},
        lambda: {"type": "array", "items": inner(), "minItems": rng.choice([0, 1]), "maxItems": 1},
        lambda: {"anyOf": [inner(), inner()]},
        lambda: {"allOf": [inner()]},
    ])()  # fmt: skip


def _has_value(schema: dict[str, Any], definitions: dict[str, dict[str, Any]], fuel: int) -> bool:
    """Look for a value by trying: follow up to `fuel` references on a way."""
    match schema:
        case {"$ref": str(reference)}:
            return fuel > 0 and _has_value(definitions[reference[-1]], definitions, fuel - 1)
        case {"type": "object"}:
            return not schema["required"] or _has_value(schema["properties"]["x"], definitions, fuel)
        case {"type": "array"}:
            return not schema["minItems"] or _has_value(schema["items"], definitions, fuel)
        case {"anyOf": list(inner)}:
            return any(_has_value(one, definitions, fuel) for one in cast(list[dict[str, Any]], inner))
        case {"allOf": list(inner)}:
            return all(_has_value(one, definitions, fuel) for one in cast(list[dict[str, Any]], inner))
        case _:
            return True


@pytest.mark.parametrize("seed", fast_and_slow([5, *fresh_seeds(1)], list(range(30))))
def test_the_proof_agrees_with_a_search_for_values(seed: int) -> None:
    rng = random.Random(seed)
    seen: Counter[bool] = Counter()
    for _ in range(100):
        definitions = {name: _random_schema(rng, 2) for name in "abc"}
        graph = SchemaGraph(copied_schema(with_definitions(A, **definitions)))
        graph.resolve()
        try:
            graph.prove()
            has_end = True
        except SchemaFaultError:
            has_end = False
        seen[has_end] += 1
        assert has_end == _has_value(A, definitions, 4), definitions
    assert seen[True]
    assert seen[False]


@pytest.mark.parametrize("name", ["x" * 20_000, "\U0001f600" * 20_000], ids=["letters", "of four bytes"])
def test_a_short_ref_to_a_long_name_is_counted_before_it_is_written(name: str) -> None:
    schema = {"$defs": {name: {"$anchor": "a"}}, "anyOf": [{"$ref": "#a"} for _ in range(2_000)]}
    with pytest.raises(AdmissionError) as caught:
        prepared_schema("guided_json", schema, is_strict=False)
    assert caught.value.message.startswith("guided_json.anyOf.3.$ref: ")
    assert f"at most {MAX_POINTER_LETTERS} letters" in caught.value.message


def test_refs_by_pointer_and_by_short_names_are_not_limited() -> None:
    by_name = {"$defs": {"node": {"$anchor": "a"}}, "anyOf": [{"$ref": "#a"} for _ in range(2_000)]}
    by_pointer = {"$defs": {"n" * 60: {}}, "anyOf": [{"$ref": f"#/$defs/{'n' * 60}"} for _ in range(700)]}
    for schema in (by_name, by_pointer):
        prepared_schema("guided_json", schema, is_strict=False)


def test_null_is_as_absent_in_a_schema_that_only_a_ref_names() -> None:
    inner = {"$id": "p", "type": "object", "properties": None, "required": None}
    outer = {"type": "object", "properties": {"inner": {"$ref": "#/components/schemas/P"}}, "description": None}
    schema = {"components": {"schemas": {"P": inner, "Q": outer}}, "$ref": "#/components/schemas/Q"}
    before = deepcopy(schema)
    made = prepared_schema("guided_json", schema, is_strict=False).schema
    assert cast(Schema, made["components"])["schemas"]["P"] == {"type": "object"}
    assert "description" not in cast(Schema, made["components"])["schemas"]["Q"]
    assert schema == before


def test_a_ref_without_an_end_changes_no_schema_of_the_client() -> None:
    loop = {"allOf": [{"$ref": "#/components/a"}]}
    schema = {"components": {"a": loop}, "type": "object", "properties": {"x": {"$ref": "#/components/a"}}}
    before = deepcopy(schema)
    assert prepared_schema("guided_json", schema, is_strict=False).schema["components"] != before["components"]
    assert schema == before
