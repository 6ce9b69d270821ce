"""/openapi.json documents every route, and real answers match their documented schema."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import jsonschema
import pytest

from tests.server.fake_engine import Script
from tests.server.harness import Running, chat_body, running, server_settings, text_body, with_server

Tree = dict[str, Any]
ADMIN = {"authorization": "Bearer boss"}
KEY = {"authorization": "Bearer one"}
TENANTS = "admin_key: boss\ntenants: [{name: acme, key: one, kv_quota_bytes: {hbm: 1GiB}}]\n"
WITHOUT_BODY = (
    "/ping",
    "/admin/reload",
    "/v1/batches/{batch_id}/cancel",
    "/v1/messages/batches/{batch_id}/cancel",
    "/v1/responses/{id}/cancel",
    "/v1/responses/compact",  # always refused
)
OPEN = ("/health", "/health/live", "/health/ready", "/ping", "/ready", "/readiness", "/version")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    path.write_text(TENANTS)
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def document(model_folder: Path) -> Tree:
    async def test(server: Running) -> Tree:
        return cast(Tree, (await server.http.get("/openapi.json")).json())

    return with_server(
        server_settings(model_folder),
        test,
        enable_server_load_tracking=True,
        tokenizer_info_endpoint=True,
        disable_fastapi_docs=False,
    )


def _operations(document: Tree) -> Iterator[tuple[str, str, Tree]]:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield method, path, operation


def _refs(tree: object) -> Iterator[str]:
    if isinstance(tree, Mapping):
        if isinstance(tree.get("$ref"), str):
            yield tree["$ref"]
        for value in tree.values():
            yield from _refs(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _refs(value)


def test_every_route_documents_its_body_its_answers_and_its_refusals(document: Tree) -> None:
    for method, path, operation in _operations(document):
        place = f"{method} {path}"
        has_body = method in ("post", "put", "patch") and path not in WITHOUT_BODY
        assert ("requestBody" in operation) == has_body, place
        for media_type, content in operation.get("requestBody", {"content": {}})["content"].items():
            assert content["schema"], f"{place} {media_type}"
        responses: Tree = operation["responses"]
        assert "422" not in responses, place
        assert all(content["schema"] for answer in responses.values() for content in answer["content"].values()), place
        refusals = {status for status in responses if status.startswith("4")}
        assert ("401" in refusals) == (path not in OPEN) == ("security" in operation), place
        assert not has_body or {"400", "408", "413"} <= refusals, place


PAGE = {"after", "limit", "order"}
QUERIES = {
    "/metrics": {"detail"},
    "/v1/batches": PAGE,
    "/v1/chat/completions": {"model", "metadata[key]", *PAGE},
    "/v1/chat/completions/{id}/messages": PAGE,
    "/v1/conversations/{id}/items": PAGE,
    "/v1/files": {"purpose", *PAGE},
    "/v1/messages/batches": {"before_id", "after_id", "limit"},
    "/v1/responses/{id}": {"stream", "starting_after"},
    "/v1/responses/{id}/input_items": PAGE,
}


def test_the_fields_of_every_query_are_documented(document: Tree) -> None:
    found: dict[str, set[str]] = {}
    for method, path, operation in _operations(document):
        for field in operation.get("parameters", ()):
            if field["in"] != "query":
                assert f"{{{field['name']}}}" in path
                continue
            assert method == "get"
            assert field["description"]
            assert not field["required"]
            jsonschema.Draft202012Validator.check_schema(field["schema"])
            found.setdefault(path, set()).add(field["name"])
    assert found == QUERIES


def test_the_documented_limits_of_a_query_are_those_of_the_route(
    document: Tree, model_folder: Path, tmp_path: Path
) -> None:
    async def test(server: Running) -> None:
        stored = await server.http.post("/v1/responses", json={"input": "hi", "max_output_tokens": 3})
        for path in ("/v1/batches", "/v1/files", "/v1/responses/{id}/input_items", "/v1/responses/{id}", "/metrics"):
            place = path.replace("{id}", stored.json()["id"])
            for field in document["paths"][path]["get"]["parameters"]:
                schema: Tree = field["schema"]
                if field["in"] != "query" or not {"enum", "maximum"} & schema.keys():
                    continue
                more = {"stream": "true"} if field["name"] == "starting_after" else {}
                if "enum" in schema:
                    taken, refused = [str(value) for value in schema["enum"]], ["other"]
                else:
                    taken = [str(schema["minimum"]), str(schema["maximum"])]
                    refused = [str(schema["minimum"] - 1), str(schema["maximum"] + 1), "x"]
                for value, status in [*((value, 200) for value in taken), *((value, 400) for value in refused)]:
                    answer = await server.http.get(place, params={field["name"]: value, **more})
                    assert answer.status_code == status, f"{place} {field['name']}={value}: {answer.text}"

    with_server(server_settings(model_folder), test, files_path=str(tmp_path / "files"))


def test_every_schema_is_valid_and_every_reference_leads_to_one(document: Tree) -> None:
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    assert {ref.rpartition("/")[2] for ref in _refs(document)} == set(schemas)


def _check(document: Tree, method: str, path: str, status: int, body: object, *, media_type: str) -> None:
    """Validate an answer against the schema of its route."""
    schema = document["paths"][path][method]["responses"][str(status)]["content"][media_type]["schema"]
    jsonschema.validate(body, {**schema, "components": document["components"]}, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("post", "/v1/chat/completions", chat_body(max_tokens=3, logprobs=True, top_logprobs=2), KEY, 200),
        ("post", "/v1/chat/completions", chat_body(max_tokens=0), KEY, 400),
        ("post", "/v1/chat/completions", chat_body(), {}, 401),
        ("post", "/v1/chat/completions", chat_body(model="other"), KEY, 404),
        ("get", "/v1/chat/completions", None, KEY, 200),
        ("post", "/v1/completions", text_body(max_tokens=3, logprobs=2, n=2, stop=["x"]), KEY, 200),
        ("post", "/v1/completions", text_body([[8, 9], [10]], max_tokens=1), KEY, 200),
        ("post", "/v1/completions", text_body([7]), KEY, 500),
        ("post", "/v1/messages", chat_body(max_tokens=3), KEY, 200),
        ("post", "/v1/messages", chat_body(), KEY, 400),
        ("post", "/v1/messages", chat_body(max_tokens=3), {}, 401),
        ("post", "/v1/messages/count_tokens", chat_body(), KEY, 200),
        ("post", "/v1/responses", {"input": "hi", "max_output_tokens": 3, "top_logprobs": 2}, KEY, 200),
        ("post", "/v1/responses", {"input": "hi", "max_output_tokens": 3, "background": True}, KEY, 200),
        ("post", "/v1/responses", {"input": []}, KEY, 400),
        ("post", "/v1/responses", {"input": "hi"}, {}, 401),
        ("post", "/v1/responses/input_tokens", {"input": "hi"}, KEY, 200),
        ("post", "/v1/responses/compact", {"input": "hi"}, KEY, 404),
        ("post", "/v1/conversations", {"metadata": {"a": "b"}}, KEY, 200),
        ("get", "/v1/models", None, KEY, 200),
        ("post", "/tokenize", text_body(return_token_strs=True), KEY, 200),
        ("post", "/tokenize", chat_body(), KEY, 200),
        ("post", "/detokenize", {"tokens": [8, 9]}, KEY, 200),
        ("post", "/detokenize", {}, KEY, 400),
        ("get", "/admin/tenants", None, ADMIN, 200),
        ("get", "/admin/tenants", None, KEY, 401),
        ("get", "/admin/config", None, ADMIN, 200),
        ("patch", "/admin/config", {"max-num-queued-reqs": 9}, ADMIN, 400),  # settings without an origin
        ("post", "/admin/reload", None, ADMIN, 200),
        ("get", "/health", None, {}, 200),
        ("get", "/health/live", None, {}, 200),
        ("get", "/ready", None, {}, 200),
        ("get", "/version", None, {}, 200),
        ("get", "/load", None, KEY, 200),
    ],
)  # fmt: skip
@pytest.mark.sampled(16)
def test_answers_match_their_documented_schema(
    method: str,
    path: str,
    body: dict[str, object] | None,
    headers: dict[str, str],
    status: int,
    document: Tree,
    model_folder: Path,
    file: Path,
) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.request(method, path, json=body, headers=headers)
        assert answer.status_code == status, answer.text
        _check(document, method, path, status, answer.json(), media_type="application/json")

    settings = server_settings(model_folder)
    script = Script(fail_prompt_with=7)
    with_server(
        settings,
        test,
        script,
        tenants_config=str(file),
        enable_server_load_tracking=True,
        tokenizer_info_endpoint=True,
    )


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
def test_stream_events_match_their_documented_schema(path: str, document: Tree, model_folder: Path) -> None:
    async def test(server: Running) -> None:
        extra: dict[str, object] = {"stream": True, "max_tokens": 3, "stream_options": {"include_usage": True}}
        body = text_body(**extra, logprobs=1) if path == "/v1/completions" else chat_body(**extra)
        if path == "/v1/responses":
            body = {"input": "hello", "stream": True, "max_output_tokens": 3, "top_logprobs": 1}
        answer = await server.http.post(path, json=body)
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        assert len(events) >= 4
        for event in events:
            if event == "[DONE]":
                continue
            _check(document, "post", path, 200, _json(event), media_type="text/event-stream")

    with_server(server_settings(model_folder), test)


def test_answers_without_an_engine_match_their_documented_schema(document: Tree, model_folder: Path) -> None:
    async def test(server: Running) -> None:
        await server.context.client.status.wait_gone()
        for path in ("/health", "/ready"):
            answer = await server.http.get(path)
            assert answer.status_code == 503
            _check(document, "get", path, 503, answer.json(), media_type="application/json")

    async def run() -> None:
        async with running(server_settings(model_folder), Script(failure="no"), wait=False) as server:
            await test(server)

    asyncio.run(run())


def _json(text: str) -> object:
    return cast(object, json.loads(text))
