"""/openapi.json allows what the server takes, and nothing that it refuses: bodies at the limits, both asked."""

from pathlib import Path
from typing import Any, cast

import jsonschema
import pytest

from tests.server.fake_engine import Script
from tests.server.harness import MODEL, Running, chat_body, server_settings, text_body, with_server

CHAT, TEXT, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
CONVERSATIONS = "/v1/conversations"
Body = dict[str, Any]  # Any: JSON


def _chat(**fields: object) -> Body:
    return cast(Body, chat_body(**fields)) | {"max_tokens": 2} | fields  # pyright: ignore[reportArgumentType] - JSON


def _text(**fields: object) -> Body:
    return cast(Body, text_body()) | {"max_tokens": 2} | fields


def _says(**message: object) -> Body:
    return _chat(messages=[{"role": "user", "content": "a"}, message, {"role": "user", "content": "b"}])


TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
NAMED = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "object"}

TAKEN: list[tuple[str, Body]] = [
    *((TEXT, _text(prompt=prompt)) for prompt in ("a", ["a", "b"], [5], [[5], [6, 7]], [1023], ["a"] * 65)),
    *((TEXT, _text(**fields)) for fields in (
        {"max_tokens": 0, "echo": True}, {"logit_bias": {"5": -100, "1023": 100}}, {"stop_token_ids": [0, 1023]},
        {"logprobs": 20}, {"logprobs": None}, {"prompt_logprobs": 20}, {"prompt_logprobs": 0, "stream": True},
        {"stream": True, "stream_options": {"include_usage": True}}, {"best_of": 2}, {"best_of": 1, "stream": True},
        {"use_beam_search": False}, {"prompt_embeds": []}, {"functions": None}, {"echo": True},
        {"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": 1}, {"suffix": ""}, {"truncation_side": "right"},
        {"guided_choice": ["a"]}, {"guided_regex": "a+", "ignore_eos": False}, {"response_format": {"type": "text"}},
        {"response_format": {"type": "text"}, "regex": "a"}, {"structured_outputs": {"json_object": True}},
        {"structured_outputs": {"choice": ["a"], "json_object": False}}, {"bad_words": ["word"]}, {"n": 2},
    )),
    *((CHAT, _chat(**fields)) for fields in (
        {"max_tokens": 1}, {"max_completion_tokens": 1},
        {"logprobs": True, "top_logprobs": 20}, {"top_logprobs": 0}, {"chat_template_kwargs": {"a": True}},
        {"tools": [TOOL], "tool_choice": "auto"}, {"tool_choice": "none"}, {"function_call": "none"}, {"echo": False},
        {"add_generation_prompt": False, "continue_final_message": True}, {"modalities": ["text"]},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, {"audio": None},
    )),
    *((CHAT, _says(**message)) for message in (
        {"role": "assistant", "content": None}, {"role": "assistant"}, {"role": "user", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "user", "content": []},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    )),
    (EMBEDDINGS, {"input": ["a", "b"]}), (EMBEDDINGS, {"input": [[5]], "truncate_prompt_tokens": 5}),
    ("/rerank", {"query": "a", "documents": ["b"]}), ("/rerank", {"query": "a", "texts": ["b"], "truncate": True}),
    ("/score", {"text_1": "a", "text_2": ["b"]}),
    ("/tokenize", {"prompt": ""}),
    ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}),
    ("/detokenize", {"tokens": []}), ("/detokenize", {"tokens": [0, 1023]}),
    (RESPONSES, {"input": "a", "max_output_tokens": 2, "tool_choice": "auto"}), (RESPONSES, {"max_output_tokens": 2}),
    (CONVERSATIONS, {}), (CONVERSATIONS, {"items": [{"role": "user", "content": "a"}] * 20}),
    (RESPONSES, {"input": "a", "max_output_tokens": 2, "text": {"format": {"type": "text"}}, "n": 1}),
    (MESSAGES, _chat(tool_choice={"type": "none"})),
]  # fmt: skip

REFUSED: list[tuple[str, Body]] = [
    (TEXT, {"model": MODEL}),
    *((TEXT, _text(prompt=prompt)) for prompt in (None, "", [], [""], ["a", ""], [[]], [[5], []], [-1], [1024])),
    *((TEXT, _text(prompt=prompt)) for prompt in (["a", 5], [[5], "a"], [True], {"a": 1})),
    (TEXT, _text(prompt=["a"] * 4097)),
    *((TEXT, _text(**fields)) for fields in (
        {"max_tokens": -1}, {"logit_bias": {"a": 1}}, {"logit_bias": {"5": 101}}, {"logit_bias": {"-5": 1}},
        {"stop_token_ids": [-1]}, {"stop_token_ids": [1024]}, {"allowed_token_ids": [1024]}, {"logprobs": 21},
        {"prompt_logprobs": 21}, {"prompt_logprobs": -1}, {"prompt_logprobs": 1, "stream": True},
        {"stream_options": {"include_usage": True}}, {"stream_options": {}, "stream": False},
        {"best_of": 2, "stream": True}, {"use_beam_search": True}, {"functions": []}, {"logprob_token_ids": [5]},
        {"documents": []}, {"prompt_embeds": ["a"]}, {"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": -2},
        {"truncation_side": "both"}, {"guided_choice": []}, {"guided_choice": [""]}, {"guided_choice": ["a"] * 1025},
        {"guided_regex": "a" * 8193},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {}}}, {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False}}, {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        {"structured_outputs": {"json_object": True, "regex": "a"}}, {"bad_words": [" "]},
    )),
    *((CHAT, _chat(**fields)) for fields in (
        {"max_tokens": 0}, {"max_completion_tokens": 0}, {"max_completion_tokens": -1}, {"top_logprobs": 1},
        {"top_logprobs": -1}, {"logprobs": True, "top_logprobs": 21}, {"chat_template_kwargs": {"a": "b"}},
        {"tool_choice": "auto"}, {"tool_choice": "other", "tools": [TOOL]}, {"tool_choice": {}, "tools": [TOOL]},
        {"tool_choice": NAMED}, {"tools": []}, {"echo": True}, {"function_call": "auto"}, {"modalities": ["audio"]},
        {"continue_final_message": True}, {"audio": {}}, {"chat_template": "a"}, {"truncate_prompt_tokens": 0},
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [TOOL]}}},
    )),
    *((CHAT, _says(**message)) for message in (
        {"role": "user"}, {"role": "user", "content": None}, {"role": "user", "content": [{"type": "image_url"}]},
        {"role": "user", "content": [{"type": "text"}]}, {"role": "user", "content": "a", "tool_calls": [CALL]},
        {"role": "user", "content": "a", "function_call": {"name": "f"}}, {"role": "tool", "content": "a"},
        {"role": "user", "content": "a", "prefix": True},
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": 5}}]},
    )),
    (EMBEDDINGS, {"input": ["a"] * 2049}), (EMBEDDINGS, {"input": [-1]}), (EMBEDDINGS, {"input": ""}),
    (EMBEDDINGS, {"input": "a", "documents": []}), (EMBEDDINGS, {"input": None}),
    ("/rerank", {"query": "a", "documents": []}), ("/rerank", {"query": "a"}),
    ("/rerank", {"query": "a", "documents": ["b"] * 2049}), ("/score", {"text_1": "a", "text_2": []}),
    ("/score", {"text_1": ["a", "b"], "text_2": "a"}),
    ("/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 2049}),
    ("/tokenize", {"prompt": "a", "truncate_prompt_tokens": 5}), ("/tokenize", {}),
    ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "continue_final_message": True}),
    ("/detokenize", {"tokens": [-1]}), ("/detokenize", {"tokens": [1024]}), ("/detokenize", {}),
    (RESPONSES, {"input": []}), (RESPONSES, {"conversation": "c", "previous_response_id": "r"}),
    *((CONVERSATIONS, {"items": items}) for items in ("a", [{}], [{"role": "user", "content": "a"}] * 21)),
    *((RESPONSES, {"input": "a", **fields}) for fields in (
        {"tools": [{"type": "web_search"}]}, {"n": 2}, {"tool_choice": "required"}, {"messages": []}, {"max_tokens": 5},
        {"text": {"format": {"type": "json_schema"}}}, {"top_logprobs": 21}, {"background": True, "store": False},
    )),
    (MESSAGES, _chat(tool_choice={"type": "auto"})), (MESSAGES, _chat(tool_choice={"type": "tool"})),
]  # fmt: skip


@pytest.mark.parametrize(("bodies", "is_taken"), [(TAKEN, True), (REFUSED, False)], ids=["taken", "refused"])
def test_the_document_and_the_server_agree(bodies: list[tuple[str, Body]], is_taken: bool, model_folder: Path) -> None:
    async def test(server: Running) -> list[str]:
        document = cast(Body, (await server.http.get("/openapi.json")).json())
        validators: dict[str, Any] = {}  # Any: jsonschema has no types
        differences: list[str] = []
        for path, body in bodies:
            if path not in validators:
                schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
                whole = {**schema, "components": document["components"]}
                validators[path] = jsonschema.Draft202012Validator(whole)
            is_documented = validators[path].is_valid(body)
            answer = await server.http.post(path, json=body)
            if (is_documented, answer.status_code == 200) != (is_taken, is_taken):
                shown = f"{path} {str(body)[:160]}"
                differences.append(f"{shown}: documented={is_documented} -> {answer.status_code} {answer.text[:200]}")
        return differences

    found = with_server(
        server_settings(model_folder), test, Script(max_model_len=2048, blocks_total=256), disable_fastapi_docs=False
    )
    assert found == []


def test_the_document_follows_the_limits_of_the_settings(model_folder: Path) -> None:
    async def test(server: Running) -> object:
        document = cast(Body, (await server.http.get("/openapi.json")).json())
        return jsonschema.Draft202012Validator(
            {"$ref": "#/components/schemas/CompletionFields", "components": document["components"]}
        ).is_valid(_text(logprobs=-1))

    for limit, is_allowed in ((20, False), (-1, True)):
        settings = server_settings(model_folder)
        assert with_server(settings, test, max_logprobs=limit, disable_fastapi_docs=False) == is_allowed
