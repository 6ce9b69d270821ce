"""/v1/messages: conversations, answers and streams in Anthropic's form."""

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import cast

import httpx
import pytest
from msgspec.structs import replace
from pydantic_core import from_json

from tests.server.fake_engine import Script
from tests.server.harness import MODEL, Running, running, server_settings, until, with_server
from tiercel.server.text.tokenizer import TextCodec
from tiercel.values.request import unpack_tokens

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
Tree = dict[str, object]


def body(content: object = "hello world", **more: object) -> Tree:
    return {"model": MODEL, "max_tokens": 16, "messages": [{"role": "user", "content": content}], **more}


def script(codec: TextCodec, text: str = "Hello there, world!", **more: object) -> Script:
    end = codec.encode("</s>", add_special_tokens=False)[0]
    reply = (*codec.encode(text, add_special_tokens=False), end)
    return dataclasses.replace(Script(reply=reply, end_token=end), **more)  # type: ignore[arg-type]


def events_of(text: str) -> list[Tree]:
    """Return the data of each event; its name must be its type."""
    events: list[Tree] = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(cast(Tree, json.loads(data.removeprefix("data: "))))
        assert name == f"event: {events[-1]['type']}"
    return events


def error_of(answer: httpx.Response) -> Tree:
    """Return the error of a refusal after checking its form."""
    fault = cast(Tree, answer.json())
    assert set(fault) == {"type", "error", "request_id"}, answer.text
    assert fault["type"] == "error"
    assert fault["request_id"] == answer.headers["request-id"]
    error = cast(Tree, fault["error"])
    assert set(error) == {"type", "message", "details"}
    return error


def prompt_of(server: Running, codec: TextCodec, index: int = -1) -> str:
    return codec.decode(list(unpack_tokens(server.engine.submitted[index].prompt)))


def serve(
    model_folder: Path, test: Callable[[Running], Awaitable[None]], with_script: Script, **changes: object
) -> None:
    with_server(server_settings(model_folder), test, with_script, **changes)


def test_a_whole_message(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(MESSAGES, json=body(temperature=0.5, metadata={"user_id": "me"}))
        assert answer.status_code == 200, answer.text
        message = cast(Tree, answer.json())
        prompt = len(server.engine.submitted[0].prompt) // 4
        assert str(message.pop("id")).startswith("msg_")
        assert message == {
            "type": "message",
            "role": "assistant",
            "model": MODEL,
            "content": [{"type": "text", "text": "Hello there, world!"}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": prompt - 3,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 3,
                "output_tokens": len(server.engine.script.reply),
                "service_tier": "standard",
            },
        }
        assert answer.headers["request-id"]

    serve(model_folder, test, script(codec, cached=3))


def test_a_stream_byte_by_byte(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(MESSAGES, json=body(stream=True))
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        reply = server.engine.script.reply[:-1]
        prompt, total = len(server.engine.submitted[0].prompt) // 4, len(reply) + 1
        pieces = [codec.decode([token]) for token in reply]
        id = events_of(answer.text)[0]["message"]["id"]  # type: ignore[index]
        usage = (
            '{"input_tokens":%d,"cache_creation_input_tokens":0,"cache_read_input_tokens":%d,"output_tokens":%d,'
            '"service_tier":"standard"}'
        )
        message = (
            f'{{"type":"message","id":"{id}","role":"assistant","model":"{MODEL}","content":[],"stop_reason":null,'
            f'"stop_sequence":null,"usage":{usage % (prompt, 0, 1)}}}'
        )
        expected = f'event: message_start\ndata: {{"type":"message_start","message":{message}}}\n\n'
        expected += (
            'event: content_block_start\ndata: {"type":"content_block_start","index":0,'
            '"content_block":{"type":"text","text":""}}\n\n'
        )
        for piece in pieces:
            expected += (
                'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
                f'"delta":{{"type":"text_delta","text":{json.dumps(piece, ensure_ascii=False)}}}}}\n\n'
            )
        expected += 'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
        expected += (
            'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn",'
            f'"stop_sequence":null}},"usage":{usage % (prompt - 2, 2, total)}}}\n\n'
        )
        expected += 'event: message_stop\ndata: {"type":"message_stop"}\n\n'
        assert answer.text == expected

    serve(model_folder, test, script(codec, cached=2, step_s=0.002))


@pytest.mark.parametrize(
    ("more", "reason", "sequence"),
    [
        ({"max_tokens": 2}, "max_tokens", None),
        ({"stop_sequences": ["never", "there"]}, "stop_sequence", "there"),
        ({"stop_sequences": [*map(str, range(15)), "wor"]}, "stop_sequence", "wor"),
        ({}, "end_turn", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_stop_reasons(
    more: Tree, reason: str, sequence: str | None, model_folder: Path, codec: TextCodec, stream: bool
) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(MESSAGES, json=body(stream=stream, **more))
        end = cast(Tree, events_of(answer.text)[-2]["delta"] if stream else answer.json())
        assert (end["stop_reason"], end["stop_sequence"]) == (reason, sequence)
        assert sequence is None or sequence not in answer.text.replace(f'"stop_sequence":"{sequence}"', "")

    serve(model_folder, test, script(codec))


def test_a_message_whose_time_is_up_is_paused(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(MESSAGES, json=body(timeout=1.5, max_tokens=200))
        assert answer.json()["stop_reason"] == "pause_turn", answer.text
        assert answer.json()["content"][0]["text"]

    serve(model_folder, test, Script(step_s=0.05))


def test_an_answer_without_text_has_no_block(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(MESSAGES, json=body())
        assert (answer.json()["content"], answer.json()["stop_reason"]) == ([], "end_turn")
        stream = await server.http.post(MESSAGES, json=body(stream=True))
        assert [event["type"] for event in events_of(stream.text)] == ["message_start", "message_delta", "message_stop"]

    serve(model_folder, test, script(codec, ""))


@pytest.mark.parametrize(
    ("messages", "system", "rendered"),
    [
        (
            [{"role": "user", "content": "one"}],
            "be short",
            "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}]}],
            [{"type": "text", "text": "be"}, {"type": "text", "text": "short"}],
            "<|im_start|>system\nbe\nshort<|im_end|>\n<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            [{"role": "user", "content": "one"}, {"role": "user", "content": [{"type": "text", "text": "two"}]}],
            None,
            "<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two th"}],
            None,
            "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\ntwo th",
        ),
        ([{"role": "user", "content": []}], None, "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"),
        (
            [
                {"role": "user", "content": "one"},
                {"role": "assistant", "content": []},
                {"role": "user", "content": "two"},
                {"role": "system", "content": "now be long"},
                {"role": "user", "content": "three"},
            ],
            None,
            "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n"
            "<|im_start|>system\nnow be long<|im_end|>\n<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
)
def test_conversations_become_prompts(
    messages: list[Tree], system: object, rendered: str, model_folder: Path, codec: TextCodec
) -> None:
    async def test(server: Running) -> None:
        request = {**body(), "messages": messages, "system": system}
        assert (await server.http.post(MESSAGES, json=request)).status_code == 200
        expected = codec.encode(f"<s>{rendered}", add_special_tokens=False)
        assert server.engine.submitted[0].prompt == b"".join(token.to_bytes(4, "little") for token in expected)
        del request["max_tokens"]
        counted = await server.http.post(COUNT, json=request)
        assert counted.json() == {"input_tokens": len(expected)}

    serve(model_folder, test, script(codec))


def test_thinking_is_a_switch_of_the_template(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        for thinking, is_on in (
            ({"type": "enabled", "budget_tokens": 1024}, True),
            ({"type": "disabled"}, False),
            ({"type": "adaptive"}, False),
        ):
            assert (await server.http.post(MESSAGES, json=body(thinking=thinking))).status_code == 200
            assert prompt_of(server, codec).endswith("<think>") == is_on

    serve(model_folder, test, script(codec))


def test_sampling_fields_reach_the_engine(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        sampling = {"temperature": 0.25, "top_p": 0.5, "top_k": 7, "seed": 11, "max_tokens": 9}
        assert (await server.http.post(MESSAGES, json=body(**sampling))).status_code == 200
        params = server.engine.submitted[0].params
        assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.25, 0.5, 7, 11)
        assert params.max_tokens == 9

    serve(model_folder, test, script(codec))


def test_a_schema_becomes_a_grammar(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        config = {"format": {"type": "json_schema", "schema": schema}, "effort": "max"}
        answer = await server.http.post(MESSAGES, json=body(output_config=config))
        assert answer.status_code == 200, answer.text
        assert server.engine.submitted[0].params.grammar
        config["format"]["schema"] = {"type": "nothing"}  # type: ignore[index]
        refused = await server.http.post(MESSAGES, json=body(output_config=config))
        assert refused.status_code == 400
        assert "output_config.format" in str(error_of(refused)["message"])

    serve(model_folder, test, script(codec))


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
REFUSED: list[tuple[str, Tree, int, str, str]] = [
    # name, fields to change, status, type, words
    ("no max_tokens", {"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
    ("max_tokens", {"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
    ("too long", {"max_tokens": 500}, 400, "invalid_request_error", "maximum context length"),
    ("no messages", {"messages": []}, 400, "invalid_request_error", "messages"),
    ("a model", {"model": "claude-opus"}, 404, "not_found_error", "The model `claude-opus` does not exist"),
    ("an image", {"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "invalid_request_error", "type image"),
    (
        "a document",
        {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
        400,
        "invalid_request_error",
        "messages.0.content.0: a block of type document is not supported in a user message",
    ),
    (
        "a result without a call",
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
        400,
        "invalid_request_error",
        "no tool_use block before it",
    ),
    ("no text", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "invalid_request_error", "text"),
    ("a role", {"messages": [{"role": "tool", "content": "x"}]}, 400, "invalid_request_error", "messages.0.role"),
    ("system", {"system": [IMAGE]}, 400, "invalid_request_error", "system.content.0: a block of type image"),
    ("thinking", {"thinking": {"type": "between_tools"}}, 400, "invalid_request_error", "thinking.type"),
    ("a budget", {"thinking": {"type": "enabled", "budget_tokens": 5}}, 400, "invalid_request_error", "budget_tokens"),
    (
        "a hosted tool",
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        400,
        "invalid_request_error",
        "a tool of type web_search_20250305 runs at Anthropic",
    ),
    ("mcp", {"mcp_servers": [{"url": "x"}]}, 400, "invalid_request_error", "mcp_servers is not supported"),
    ("a stop", {"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences"),
    ("stops", {"stop_sequences": ["x"] * 17}, 400, "invalid_request_error", "stop_sequences"),
    ("temperature", {"temperature": -1}, 400, "invalid_request_error", "temperature"),
    ("a high temperature", {"temperature": 1.5}, 400, "invalid_request_error", "temperature"),
    ("tier", {"service_tier": "priority"}, 400, "invalid_request_error", "service_tier"),
]


@pytest.mark.parametrize(
    ("changes", "status", "kind", "words"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_refusals(changes: Tree, status: int, kind: str, words: str, model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        request = {name: value for name, value in {**body(), **changes}.items() if value is not None}
        answer = await server.http.post(MESSAGES, json=request)
        error = error_of(answer)
        assert (answer.status_code, error["type"]) == (status, kind)
        assert words in str(error["message"])
        assert server.engine.submitted == []

    serve(model_folder, test, script(codec))


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_threads_are_refused_with_the_code_that_makes_the_sdk_send_the_whole_conversation(
    path: str, thread: Tree, model_folder: Path, codec: TextCodec
) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(path, json={**body(), "thread": thread})
        error = error_of(answer)
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["details"] == {"error_code": "thread_unsupported_request"}

    serve(model_folder, test, script(codec))


def test_models_have_the_shape_of_the_api_that_asks(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        headers = {"x-api-key": "k1", "anthropic-version": "2023-06-01"}
        page = (await server.http.get("/v1/models?limit=1000", headers=headers)).json()
        model, alias = page["data"]
        assert page == {"data": [model, alias], "first_id": MODEL, "last_id": "alias", "has_more": False}
        assert datetime.fromisoformat(model.pop("created_at")).tzinfo is not None
        length = model.pop("max_input_tokens")
        assert model.pop("max_tokens") == length > 0
        assert model == {"type": "model", "id": MODEL, "display_name": MODEL, "lifecycle": "active"}
        one = (await server.http.get(f"/v1/models/{MODEL}", headers=headers)).json()
        assert one == page["data"][0] | {
            "created_at": one["created_at"],
            "max_input_tokens": length,
            "max_tokens": length,
        }
        answer = await server.http.get("/v1/models/other", headers=headers)
        assert (answer.status_code, error_of(answer)["type"]) == (404, "not_found_error")
        assert answer.headers["request-id"]
        answer = await server.http.get("/v1/models/other", headers={"authorization": "Bearer k1"})
        assert answer.json()["error"]["code"] == "model_not_found"

    serve(model_folder, test, script(codec), api_keys=("k1",))


def test_keys_in_either_header(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        for path in (MESSAGES, COUNT):
            for headers, status in (
                ({"x-api-key": "k1", "anthropic-version": "2023-06-01"}, 200),
                ({"authorization": "Bearer k1"}, 200),
                ({"x-api-key": "wrong", "authorization": "Bearer k1"}, 401),
                ({"x-api-key": "wrong"}, 401),
                ({}, 401),
            ):
                answer = await server.http.post(path, json=body(), headers=headers)
                assert answer.status_code == status, (path, headers)
                if status == 401:
                    assert error_of(answer)["type"] == "authentication_error"
        version = {"anthropic-version": "2023-06-01"}
        for path in ("/v1/models", f"/v1/models/{MODEL}"):
            for headers, status in (
                ({"x-api-key": "k1", **version}, 200),
                ({"x-api-key": "k1"}, 401),  # only a client of Anthropic names its key so
                ({"x-api-key": "wrong", "authorization": "Bearer k1", **version}, 401),
                ({"authorization": "Bearer k1", **version}, 200),
                ({"authorization": "Bearer k1"}, 200),
                (version, 401),
            ):
                answer = await server.http.get(path, headers=headers)
                assert answer.status_code == status, (path, headers)
        elsewhere = await server.http.post("/tokenize", json={"prompt": "a"}, headers={"x-api-key": "k1", **version})
        assert elsewhere.status_code == 401

    serve(model_folder, test, script(codec), api_keys=("k1",))


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", MESSAGES, 405, "invalid_request_error"),
        ("GET", f"{MESSAGES}/drafts", 404, "not_found_error"),
        ("POST", f"{MESSAGES}/none", 404, "not_found_error"),
    ],
)
def test_routes_that_do_not_exist(method: str, path: str, status: int, kind: str, model_folder: Path) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.request(method, path)
        assert (answer.status_code, error_of(answer)["type"]) == (status, kind)

    serve(model_folder, test, Script())


def test_faults_of_bodies(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        large = await server.http.post(MESSAGES, content=b"x" * 3000)
        assert (large.status_code, error_of(large)["type"]) == (413, "request_too_large")
        broken = await server.http.post(MESSAGES, content=b"{")
        assert (broken.status_code, error_of(broken)["type"]) == (400, "invalid_request_error")
        other = await server.http.post(MESSAGES, json=body(), headers={"host": "a,b"})
        assert (other.status_code, error_of(other)["type"]) == (400, "invalid_request_error")

    serve(model_folder, test, Script(), max_body_bytes=2048, host="127.0.0.1")


async def _exchange(port: int, sent: bytes) -> tuple[bytes, Tree, Tree]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    async with asyncio.timeout(5):
        head, _, tail = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    headers = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:])
    return head.split(b"\r\n")[0], {key.decode(): value.decode() for key, value in headers.items()}, json.loads(tail)


def test_faults_that_the_transport_finds(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        head = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\n"
        many = b"".join(b"a%d: b\r\n" % number for number in range(400))
        for sent, status in (
            (head + many + b"\r\n", b"431"),
            (head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b"400"),
        ):
            line, headers, fault = await _exchange(server.port, sent)
            assert status in line
            assert fault["type"] == "error"
            assert fault["error"]["type"] == "invalid_request_error"  # type: ignore[index]
            assert fault["request_id"] == headers["request-id"]

    serve(model_folder, test, Script())


def test_limits_and_overload(model_folder: Path, tmp_path: Path, codec: TextCodec) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: [{name: a, key: ka, requests_per_minute: 1}, {name: b, key: kb}]\n")
    file.chmod(0o600)

    async def test(server: Running) -> None:
        first = await server.http.post(MESSAGES, json=body(), headers={"x-api-key": "ka"})
        assert first.status_code == 200
        assert first.headers["x-ratelimit-remaining-requests"] == "0"
        limited = await server.http.post(MESSAGES, json=body(), headers={"x-api-key": "ka"})
        assert (limited.status_code, error_of(limited)["type"]) == (429, "rate_limit_error")
        assert int(limited.headers["retry-after"]) >= 1
        waiting = [
            asyncio.create_task(server.http.post(MESSAGES, json=body(), headers={"x-api-key": "kb"})) for _ in range(2)
        ]
        await until(lambda: server.context.client.sequences.num_tokenless == 2)
        full = await server.http.post(MESSAGES, json=body(), headers={"x-api-key": "kb"})
        assert (full.status_code, error_of(full)["type"]) == (529, "overloaded_error")
        assert int(full.headers["retry-after"]) >= 1
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200]
        server.context.admission.close()
        closed = await server.http.post(MESSAGES, json=body(), headers={"x-api-key": "kb"})
        assert (closed.status_code, error_of(closed)["type"]) == (503, "overloaded_error")

    async def run() -> None:
        settings = replace(server_settings(model_folder), tenants_config=str(file), max_num_queued_reqs=2)
        async with running(settings, script(codec, step_s=0.1)) as server:
            await test(server)

    asyncio.run(run())


def test_a_failure_in_the_middle_is_an_error_event(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(MESSAGES, json=body(stream=True, max_tokens=100))
        events = events_of(answer.text)
        assert events[-1]["type"] == "error"
        assert events[-1]["error"]["type"] == "overloaded_error"  # type: ignore[index]
        assert events[-1]["request_id"] == answer.headers["request-id"]
        assert "[DONE]" not in answer.text

    serve(model_folder, test, Script(step_s=0.02, die_at_step=3))


def test_a_failed_sequence_is_an_api_error(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(MESSAGES, json=body())
        assert (answer.status_code, error_of(answer)["type"]) == (500, "api_error")
        assert "secret" not in answer.text

    serve(model_folder, test, Script(fail_prompt_with=codec.encode("hello", add_special_tokens=False)[0]))


def test_pings_end_silences(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(MESSAGES, json=body(stream=True, max_tokens=2))
        assert 'event: ping\ndata: {"type":"ping"}\n\n' in answer.text
        kinds = [event["type"] for event in events_of(answer.text) if event["type"] != "ping"]
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"

    serve(model_folder, test, script(codec, step_s=0.3), sse_keep_alive_interval_s=0.05)


def test_a_client_that_leaves_leaves_nothing_behind(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        async with server.http.stream("POST", MESSAGES, json=body(stream=True, max_tokens=200)) as answer:
            await anext(answer.aiter_lines())
        await until(lambda: server.engine.live == 0 and server.context.client.sequences.num_unfinished == 0)

    serve(model_folder, test, Script(step_s=0.02))


def test_messages_are_logged_and_measured_as_generations(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(MESSAGES, json=body())
        assert "total;dur=" in answer.headers["server-timing"]
        counted = (await server.http.get("/metrics")).text
        assert 'handler="/v1/messages",method="POST",status="2xx"} 1.0' in counted

    serve(model_folder, test, script(codec))


WEATHER: Tree = {
    "name": "get_weather",
    "description": "Returns the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }} <tool_call><|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)


def serve_tools(model_folder: Path, test: Callable[[Running], Awaitable[None]], with_script: Script) -> None:
    roomy = dataclasses.replace(with_script, max_model_len=2048, blocks_total=256)
    serve(model_folder, test, roomy, chat_template=TOOL_TEMPLATE)


def test_a_call_and_its_result(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        request = body("weather?", tools=[WEATHER], max_tokens=100)
        first = (await server.http.post(MESSAGES, json=request)).json()
        assert first["stop_reason"] == "tool_use", first
        text, call = first["content"]
        assert str(text["text"]).rstrip() == "I look."
        assert str(call["id"]).startswith("toolu_")
        assert {**call, "id": ""} == {"type": "tool_use", "id": "", "name": "get_weather", "input": {"city": "Paris"}}
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "sunny"}]}
        messages = [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
        ]
        assert (await server.http.post(MESSAGES, json={**request, "messages": messages})).status_code == 200
        prompt = prompt_of(server, codec)
        assert '"name": "get_weather"' in prompt
        assert (
            'I look.\n[get_weather {"city": "Paris"}]<|im_end|>\n<|im_start|>tool\nsunny<|im_end|>\n'
            "<|im_start|>user\nand?<|im_end|>\n" in prompt
        )

    serve_tools(model_folder, test, script(codec, f"I look.\n{CALL}"))


def test_the_events_of_a_call(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(MESSAGES, json=body(tools=[WEATHER], max_tokens=100, stream=True))
        events = events_of(answer.text)
        shown = [
            (event["type"], event.get("index"), cast(Tree, event.get("delta", {})).get("type"))
            for event in events
            if event["type"] != "content_block_delta" or event["index"] == 1
        ]
        pieces = [shape for shape in shown if shape[0] == "content_block_delta"]
        assert set(pieces) == {("content_block_delta", 1, "input_json_delta")}
        assert [shape for shape in shown if shape not in pieces] == [
            ("message_start", None, None),
            ("content_block_start", 0, None),
            ("content_block_stop", 0, None),
            ("content_block_start", 1, None),
            ("content_block_stop", 1, None),
            ("message_delta", None, None),
            ("message_stop", None, None),
        ]
        start = next(event for event in events if event["type"] == "content_block_start" and event["index"] == 1)
        block = cast(Tree, start["content_block"])
        assert (block["type"], block["name"], block["input"]) == ("tool_use", "get_weather", {})
        deltas = [cast(Tree, event["delta"]) for event in events if event["type"] == "content_block_delta"]
        arguments = "".join(str(delta["partial_json"]) for delta in deltas if "partial_json" in delta)
        assert json.loads(arguments) == {"city": "Paris"}
        assert cast(Tree, events[-2]["delta"])["stop_reason"] == "tool_use"

    serve_tools(model_folder, test, script(codec, f"I look.\n{CALL}", step_s=0.001))


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_not_complete_has_what_can_be_read_of_its_input(
    model_folder: Path, codec: TextCodec, stream: bool
) -> None:
    text = CALL.replace("}}", ', "days": [1, 2], "note": "x y"}}')
    most = len(codec.encode(text.split(" y")[0], add_special_tokens=False))

    async def test(server: Running) -> None:
        answer = await server.http.post(MESSAGES, json=body(tools=[WEATHER], max_tokens=most, stream=stream))
        if stream:
            events = events_of(answer.text)
            pieces = [cast(Tree, event.get("delta", {})) for event in events]
            sent = from_json("".join(str(piece.get("partial_json", "")) for piece in pieces), allow_partial=True)
            assert cast(Tree, events[-2]["delta"])["stop_reason"] == "max_tokens"
            kinds = [event["type"] for event in events]
            assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1
        else:
            assert answer.json()["stop_reason"] == "max_tokens"
            (block,) = answer.json()["content"]
            assert (block["type"], block["name"]) == ("tool_use", "get_weather")
            sent = block["input"]
        assert sent == {"city": "Paris", "days": [1, 2]}

    serve_tools(model_folder, test, script(codec, text))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_thoughts_are_a_block(model_folder: Path, codec: TextCodec, stream: bool, display: str) -> None:
    async def test(server: Running) -> None:
        thinking = {"type": "enabled", "budget_tokens": 1024, "display": display}
        answer = await server.http.post(MESSAGES, json=body(thinking=thinking, stream=stream, max_tokens=100))
        thoughts: list[Tree] = [{"type": "thinking", "thinking": "hm, hm", "signature": ""}]
        if not stream:
            shown = thoughts if display == "summarized" else []
            assert answer.json()["content"] == [*shown, {"type": "text", "text": "Yes."}]
            messages = [
                {"role": "user", "content": "a"},
                {
                    "role": "assistant",
                    "content": [*answer.json()["content"], {"type": "redacted_thinking", "data": "x"}],
                },
                {"role": "user", "content": "b"},
            ]
            assert (await server.http.post(MESSAGES, json=body() | {"messages": messages})).status_code == 200
            assert ("Yes.(hm, hm)" in prompt_of(server, codec)) == (display == "summarized")
            return
        deltas = [cast(Tree, event["delta"]) for event in events_of(answer.text) if "delta" in event]
        assert "".join(str(delta.get("thinking", "")) for delta in deltas) == (
            "hm, hm" if display == "summarized" else ""
        )
        assert "".join(str(delta.get("text", "")) for delta in deltas) == "Yes."
        signatures = [delta["signature"] for delta in deltas if delta.get("type") == "signature_delta"]
        assert signatures == ([""] if display == "summarized" else [])

    serve_tools(model_folder, test, script(codec, "<think>\nhm, hm\n</think>\n\nYes."))


@pytest.mark.parametrize(
    ("more", "status", "words"),
    [
        ({"tools": [WEATHER, WEATHER]}, 400, "tools: two functions have the same name"),
        ({"tools": [{"name": "a"}]}, 400, "input_schema"),
        ({"tool_choice": {"type": "any"}}, 400, "tool_choice is only allowed together with tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, 400, "tool_choice.name is required"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "b"}}, 400, "not in tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "none"}}, 200, ""),
        ({"tools": [WEATHER], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, 200, ""),
        ({"tools": [{**WEATHER, "type": "bash_20250124"}]}, 400, "a tool of type bash_20250124 runs at Anthropic"),
    ],
)
def test_tool_choices(more: Tree, status: int, words: str, model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(MESSAGES, json=body(max_tokens=250, **more))
        assert answer.status_code == status, answer.text
        if status == 400:
            assert words in str(error_of(answer)["message"])
            return
        kinds = [block["type"] for block in answer.json()["content"]]
        is_none = cast(Tree, more["tool_choice"])["type"] == "none"
        assert kinds == (["text"] if is_none else ["tool_use"])

    serve_tools(model_folder, test, script(codec, f"{CALL}\n{CALL}"))
