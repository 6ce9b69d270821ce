"""Fields that constrain an output: the grammar that the engine gets, and refusals before any token is made."""

import json
from pathlib import Path

import pytest

from tests.server.fake_engine import Script
from tests.server.harness import Running, chat_body, server_settings, text_body, until, with_server
from tiercel.server.api.schemas.fields import read_fields
from tiercel.server.api.schemas.structured import StructuredFields
from tiercel.server.api.structured import constraint_of
from tiercel.server.grammar.schema import WHITESPACE
from tiercel.values.grammar import GRAMMAR_FAILED, NOTHING_LEFT

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SCHEMA: dict[str, object] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def json_schema(**members: object) -> dict[str, object]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, **members}}}


SPELLINGS: list[dict[str, object]] = [
    json_schema(strict=True),
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_fallback": True}},
    {"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"},
    {"guided_json": json.dumps(SCHEMA)},
    {"json_schema": json.dumps(SCHEMA), "response_format": {"type": "text"}},
]


@pytest.mark.parametrize("fields", SPELLINGS)
def test_all_spellings_of_a_schema_give_the_same_grammar(fields: dict[str, object]) -> None:
    constraint = constraint_of(read_fields(StructuredFields, fields))
    assert constraint is not None
    expected = {**SCHEMA, "x-guidance": {"whitespace_pattern": WHITESPACE}}
    assert json.loads(constraint.text) == {"grammars": [{"json_schema": expected}]}


TEXTS: list[tuple[dict[str, object], str, str]] = [
    ({"response_format": {"type": "json_object"}}, "llguidance", '"type": "object"'),
    ({"structured_outputs": {"json_object": True}}, "llguidance", '"type": "object"'),
    (
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
        "llguidance",
        "whitespace_flexible",
    ),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "[ ]?"}}, "llguidance", '"[ ]?"'),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": "[ ]?"}, "llguidance", '"[ ]?"'),
    (json_schema(), "llguidance", '"lenient": true'),
    ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
    ({"guided_regex": "a+"}, "regex", "a+"),
    ({"regex": "a+"}, "regex", "a+"),
    ({"structured_outputs": {"choice": ["a", "b"]}}, "llguidance", 'start: ("a" | "b")'),
    ({"guided_choice": ["a", "b"]}, "llguidance", 'start: ("a" | "b")'),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, "ebnf", 'start: "a"'),
    ({"guided_grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
    ({"ebnf": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
]


@pytest.mark.parametrize(("fields", "kind", "words"), TEXTS)
def test_other_constraints(fields: dict[str, object], kind: str, words: str) -> None:
    constraint = constraint_of(read_fields(StructuredFields, fields))
    assert constraint is not None
    assert constraint.format == kind
    assert words in constraint.text


def test_without_a_constraint_there_is_no_grammar() -> None:
    for fields in ({}, {"response_format": {"type": "text"}}, {"guided_json": None}, {"structured_outputs": None}):
        assert constraint_of(read_fields(StructuredFields, fields)) is None


REFUSED: list[tuple[dict[str, object], str, str]] = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format",
        "schema is missing",
    ),
    (
        {"response_format": {"type": "structural_tag", "structures": []}},
        "response_format",
        "structural_tag is not supp",
    ),
    ({"response_format": {"type": "xml"}}, "response_format", "response_format.type: expected 'text'"),
    ({"response_format": {}}, "response_format", "response_format.type"),
    ({"response_format": []}, "response_format", "expected an object"),
    ({"structured_outputs": {}}, "structured_outputs", "must have one of"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "must have one of"),
    ({"structured_outputs": {"xml": 1}}, "structured_outputs", "there is no such field"),
    (
        {"structured_outputs": {"structural_tag": "{}"}},
        "structured_outputs",
        "structured_outputs.structural_tag: there is no",
    ),
    ({"structured_outputs": {"json": 5}}, "structured_outputs", "structured_outputs.json: expected a string or"),
    ({"guided_json": [1]}, "guided_json", "guided_json: expected a string or an object"),
    ({"guided_json": "{"}, "guided_json", "guided_json: the text is no JSON"),
    ({"guided_choice": "a"}, "guided_choice", "guided_choice: expected a list of strings"),
    ({"guided_choice": [1]}, "guided_choice", "list of strings"),
    ({"guided_choice": []}, "guided_choice", "one or more choices"),
    ({"guided_regex": ""}, "guided_regex", "the text is empty"),
    ({"guided_regex": "["}, "guided_regex", "guided_regex: the grammar cannot be used"),
    ({"ebnf": "root ::= x"}, "ebnf", "ebnf: the grammar cannot be used"),
    ({"guided_json": {"type": "banana"}}, "guided_json", "guided_json.type: must be one or several of null, boolean"),
    ({"guided_json": {}, "regex": "a"}, "guided_json", "one kind of structured outputs constraint but multiple"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "structured_outputs.regex"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos", "ignore_eos cannot be combined with regex"),
]


def test_wrong_constraints_are_refused_before_any_token(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for fields, param, words in REFUSED:
            for route, body in ((CHAT, chat_body(**fields)), (TEXT, text_body(**fields))):
                answer = await server.http.post(route, json=body)
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, param), (fields, answer.text)
                assert words in error["message"], (fields, answer.text)
        assert server.engine.submitted == []

    with_server(server_settings(model_folder), test)


def test_every_choice_of_a_request_gets_the_grammar(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for route, body in ((CHAT, chat_body()), (TEXT, text_body(["a", "b"]))):
            for stream in (False, True):
                server.engine.submitted.clear()
                answer = await server.http.post(
                    route, json={**body, **json_schema(strict=True), "n": 3, "stream": stream, "stop": ["#"]}
                )
                assert answer.status_code == 200, answer.text
                grammars = {request.params.grammar for request in server.engine.submitted}
                assert len(server.engine.submitted) == 3 * (2 if route == TEXT else 1)
                (grammar,) = grammars
                assert json.loads(grammar)["grammars"][0]["json_schema"]["required"] == ["a"]
        await until(lambda: server.context.client.sequences.num_unfinished == 0)

    with_server(server_settings(model_folder), test)


def test_a_grammar_in_another_notation_is_sent_as_llguidance_reads_it(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(TEXT, json=text_body(ebnf='root ::= "a" | "b"'))
        assert answer.status_code == 200
        assert "start:" in server.engine.submitted[0].params.grammar
        answer = await server.http.post(TEXT, json=text_body())
        assert server.engine.submitted[1].params.grammar == ""

    with_server(server_settings(model_folder), test)


def test_a_model_without_grammars_refuses_them(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(CHAT, json=chat_body(response_format={"type": "json_object"}))
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "unsupported_parameter")
        assert "response_format is not supported for this model" in error["message"]
        assert (await server.http.post(CHAT, json=chat_body())).status_code == 200

    with_server(server_settings(model_folder), test, Script(has_grammars=False))


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
@pytest.mark.parametrize(
    ("failure", "code"), [(f"{GRAMMAR_FAILED}: no token is left", "grammar_failed"), (NOTHING_LEFT, "no_token_left")]
)
def test_a_grammar_that_fails_while_it_is_applied_is_the_fault_of_the_request(
    model_folder: Path, fields: dict[str, object], failure: str, code: str
) -> None:
    """As when it contradicts allowed_token_ids, which no check of one field can find."""

    async def test(server: Running) -> None:
        answer = await server.http.post(TEXT, json=text_body([7], **fields))
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == (code, "invalid_request_error")
        assert error["message"] == failure
        metrics = (await server.http.get("/metrics")).text
        assert 'tiercel_stream_errors_total{reason="engine_error"} 0.0' in metrics
        assert "tiercel_grammar_errors_total 1.0" in metrics

    script = Script(fail_prompt_with=7, prompt_failure=failure)
    with_server(server_settings(model_folder), test, script)
