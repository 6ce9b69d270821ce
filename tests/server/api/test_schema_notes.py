"""Keywords of schemas that do not act, in the header of every API; schemas without an end, refused by every API."""

from pathlib import Path
from typing import Any, cast

from tests.server.fake_engine import Script
from tests.server.harness import MODEL, Running, chat_body, server_settings, text_body, with_server

HEADER = "x-tiercel-ignored-fields"
NOT = {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}
CIRCULAR = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
NULLS = {"type": "object", "properties": None, "required": None, "items": None, "description": None}


def _format(schema: dict[str, Any], **more: object) -> dict[str, Any]:
    return {"type": "json_schema", "name": "a", "schema": schema, **more}


def requests(schema: dict[str, Any], *, strict: bool | None = None) -> list[tuple[str, dict[str, Any], str]]:
    """Return requests with a schema: the route, the body, and the place of the schema in it."""
    parameters = {"name": "f", "parameters": schema, "strict": strict}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": strict}}
    tools = {"tools": [{"type": "function", "function": parameters}], "tool_choice": "required", "max_tokens": 16}
    responses = {"model": MODEL, "input": "hello", "store": False, "max_output_tokens": 16}
    message = {"model": MODEL, "max_tokens": 16, "messages": [{"role": "user", "content": "hello"}]}
    message_tool = {"name": "f", "input_schema": schema, "strict": strict}
    return [
        ("/v1/chat/completions", chat_body(response_format=form, max_tokens=16), "response_format.json_schema.schema"),
        ("/v1/completions", text_body(response_format=form), "response_format.json_schema.schema"),
        ("/v1/chat/completions", chat_body(**tools), "tools.0.function.parameters"),
        ("/v1/responses", {**responses, "text": {"format": _format(schema, strict=strict)}}, "text.format.schema"),
        (
            "/v1/responses",
            {**responses, "tools": [{"type": "function", **parameters}], "tool_choice": "required"},
            "tools.0.parameters",
        ),
        (
            "/v1/messages",
            {**message, "tools": [message_tool], "tool_choice": {"type": "any"}},
            "tools.0.input_schema",
        ),
    ]


def strict_requests(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any], str]]:
    message = {"model": MODEL, "max_tokens": 16, "messages": [{"role": "user", "content": "hello"}]}
    return [
        *requests(schema, strict=True),
        ("/v1/completions", text_body(guided_json=schema), "guided_json"),
        (
            "/v1/chat/completions",
            chat_body(structured_outputs={"json": schema}, max_tokens=16),
            "structured_outputs.json",
        ),
        (
            "/v1/messages",
            {**message, "output_config": {"format": {"type": "json_schema", "schema": schema}}},
            "output_config.format.schema",
        ),
    ]


def test_keywords_that_do_not_act_are_named_in_the_words_of_each_api(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for route, body, place in requests(NOT):
            answer = await server.http.post(route, json={**body, "odd": 1})
            assert answer.status_code == 200, answer.text
            assert answer.headers[HEADER] == f"odd, {place}.properties.a.not"
            streamed = await server.http.post(route, json={**body, "stream": True})
            assert streamed.headers[HEADER] == f"{place}.properties.a.not"

    with_server(server_settings(model_folder), test, Script(max_model_len=4096, blocks_total=1024))


def test_strict_schemas_with_such_keywords_are_refused_by_each_api(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for route, body, place in strict_requests(NOT):
            answer = await server.http.post(route, json=body)
            assert answer.status_code == 400, answer.text
            message = cast(str, answer.json()["error"]["message"])
            assert message.startswith(f"{place}.properties.a.not: the keyword is not enforced"), message
        assert server.engine.submitted == []

    with_server(server_settings(model_folder), test, Script(max_model_len=4096, blocks_total=1024))


def test_schemas_without_an_end_are_refused_by_each_api(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for route, body, place in (*requests(CIRCULAR), *strict_requests(CIRCULAR)):
            answer = await server.http.post(route, json={**body, "stream": True})
            assert answer.status_code == 400, answer.text
            message = cast(str, answer.json()["error"]["message"])
            assert message.startswith(f"{place}.properties.a.$ref: the $ref leads back to itself"), message
        assert server.engine.submitted == []

    with_server(server_settings(model_folder), test, Script(max_model_len=4096, blocks_total=1024))


def test_null_in_a_schema_is_as_absent_in_each_api(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for route, body, _ in (*requests(NULLS), *strict_requests(NULLS)):
            answer = await server.http.post(route, json=body)
            assert answer.status_code == 200, (route, answer.text)
            assert HEADER not in answer.headers
        tools = [{"type": "function", "function": {"name": "f", "parameters": None}}]
        for schema in ({"type": None}, None):
            tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
            answer = await server.http.post("/v1/chat/completions", json=chat_body(tools=tools, tool_choice="required"))
            assert answer.status_code == 200, answer.text

    with_server(server_settings(model_folder), test, Script(max_model_len=4096, blocks_total=1024))


def test_many_keywords_are_counted(model_folder: Path) -> None:
    schema = {"properties": {f"p{number}": {"not": {}} for number in range(100)}}

    async def test(server: Running) -> None:
        _, body, _ = requests(schema)[0]
        answer = await server.http.post("/v1/chat/completions", json=body)
        names = answer.headers[HEADER].split(", ")
        assert (len(names), names[-1]) == (17, "84 more")

    with_server(server_settings(model_folder), test, Script(max_model_len=4096, blocks_total=1024))
