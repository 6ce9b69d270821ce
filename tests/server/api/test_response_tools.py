"""Calls of functions and thoughts in responses, with a scripted engine."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.server.api.test_response_stream import check_items, events_of, shape_of
from tests.server.api.test_responses import PATH, body, script
from tests.server.harness import MODEL, Running, server_settings, with_server
from tiercel.server.text.tokenizer import TextCodec
from tiercel.values.request import unpack_tokens

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": False}
]
ROOMY: dict[str, Any] = {"max_model_len": 4096, "blocks_total": 1024}
ITEM = ["response.output_item.added", "response.output_item.done"]
CALL_ORDER = [
    ITEM[0],
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    ITEM[1],
]


def test_a_whole_response_with_calls(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        answer = (await server.http.post(PATH, json=body(tools=TOOLS))).json()
        assert [item["type"] for item in answer["output"]] == ["message", "function_call", "function_call"]
        first, second = answer["output"][1:]
        assert (first["name"], first["arguments"], first["status"]) == ("add", '{"a": 1}', "completed")
        assert first["call_id"] != second["call_id"]
        assert first["id"].startswith("fc_")
        assert answer["tools"] == TOOLS
        Response.model_validate(answer, strict=True)

    with_server(server_settings(model_folder), test, script(codec, f"Let me see.{CALL}\n{CALL}", **ROOMY))


def test_a_streamed_response_with_calls(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        events = events_of((await server.http.post(PATH, json=body(tools=TOOLS, stream=True))).text)
        check_items(events)
        shape = shape_of(events)
        assert shape[-1 - 2 * len(CALL_ORDER) : -1] == CALL_ORDER * 2
        assert shape[-1] == "response.completed"
        done = [one for one in events if one["type"].endswith("arguments.done")]
        assert [(one["name"], json.loads(one["arguments"])) for one in done] == [("add", {"a": 1})] * 2
        path = f"{PATH}/{events[-1]['response']['id']}"
        again = events_of((await server.http.get(path, params={"stream": "true"})).text)
        check_items(again)
        assert shape_of(again) == shape
        assert again[-1]["response"] == events[-1]["response"]
        rest = (await server.http.get(path, params={"stream": "true", "starting_after": "3"})).text
        assert '"sequence_number":4,' in rest
        assert '"sequence_number":3,' not in rest

    with_server(server_settings(model_folder), test, script(codec, f"So.{CALL}\n{CALL}", step_s=0.002, **ROOMY))


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_call_that_is_not_complete_is_an_incomplete_item(
    model_folder: Path, codec: TextCodec, *, is_cut: bool
) -> None:
    text = CALL if is_cut else '<tool_call>\n{"name": "add", "arguments": {"a": 1]\n</tool_call>'
    most = len(codec.encode(CALL.split(": 1")[0], add_special_tokens=False)) if is_cut else 100

    async def test(server: Running) -> None:
        sent = body(tools=TOOLS, max_output_tokens=most)
        answer = (await server.http.post(PATH, json=sent)).json()
        events = events_of((await server.http.post(PATH, json={**sent, "stream": True})).text)
        check_items(events)
        for one in (answer, events[-1]["response"]):
            assert one["status"] == ("incomplete" if is_cut else "completed")
            (item,) = one["output"]
            assert (item["type"], item["name"], item["status"]) == ("function_call", "add", "incomplete")
            assert item["arguments"] == ('{"a"' if is_cut else '{"a": 1]\n')
            Response.model_validate(one, strict=True)

    with_server(server_settings(model_folder), test, script(codec, text, step_s=0.002, **ROOMY))


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_an_item_of_their_own(model_folder: Path, codec: TextCodec, *, stream: bool) -> None:
    async def test(server: Running) -> None:
        sent = await server.http.post(PATH, json=body(stream=stream))
        if stream:
            events = events_of(sent.text)
            check_items(events)
            assert [name for name in shape_of(events) if "reasoning" in name] == [
                "response.reasoning_text.delta",
                "response.reasoning_text.done",
            ]
        answer = events[-1]["response"] if stream else sent.json()
        thoughts, message = answer["output"]
        assert (thoughts["type"], thoughts["content"]) == (
            "reasoning",
            [{"type": "reasoning_text", "text": "Hm, hello."}],
        )
        assert message["content"][0]["text"].strip() == "Hello there"
        Response.model_validate(answer, strict=True)

    reply = script(codec, "<think>Hm, hello.</think>Hello there", step_s=0.002, **ROOMY)
    with_server(server_settings(model_folder), test, reply, reasoning_parser="qwen3")


def test_the_clients_tool_loop(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        def use() -> None:
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
                first = client.responses.create(model=MODEL, input="1 + 1?", tools=TOOLS)  # type: ignore[arg-type]
                (call,) = [item for item in first.output if item.type == "function_call"]
                result = {"type": "function_call_output", "call_id": call.call_id, "output": "two"}
                client.responses.create(
                    model=MODEL,
                    input=[result],
                    previous_response_id=first.id,
                    tools=TOOLS,  # type: ignore[list-item,arg-type]
                )
                talk = [{"role": "user", "content": "1 + 1?"}, call.model_dump(exclude_none=True), result]
                client.responses.create(model=MODEL, input=talk, tools=TOOLS)  # type: ignore[arg-type]

        await asyncio.to_thread(use)
        linked, whole = (codec.decode(list(unpack_tokens(one.prompt))) for one in server.engine.submitted[1:])
        assert linked == whole
        assert "two" in linked
        assert '"add"' in linked

    with_server(server_settings(model_folder), test, script(codec, CALL, **ROOMY))
