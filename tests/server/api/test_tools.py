"""Calls of functions in both forms of answers, with a scripted engine."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.fake_engine import Script
from tests.server.harness import MODEL, Running, chat_body, server_settings, with_server
from tiercel.server.text.tokenizer import TextCodec
from tiercel.values.request import unpack_tokens

CHAT = "/v1/chat/completions"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü\\"}"}}\n</tool_call>'
ARGUMENTS = '{"a": 1, "b": "ü\\"}"}'
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "now"}},
]
Tree = dict[str, Any]


def _script(codec: TextCodec, text: str, step_s: float = 0.0) -> Script:
    end = codec.encode("</s>", add_special_tokens=False)[0]
    reply = (*codec.encode(text, add_special_tokens=False), end)
    return Script(reply=reply, end_token=end, step_s=step_s, max_model_len=4096, blocks_total=1024)


def _ask(model_folder: Path, script: Script, *, settings: Tree | None = None, **more: object) -> Tree:
    async def test(server: Running) -> Tree:
        answer = await server.http.post(CHAT, json=chat_body(**{"tools": TOOLS, **more}))
        assert answer.status_code == 200, answer.text
        return answer.json()

    return with_server(server_settings(model_folder), test, script, **(settings or {}))


def _stream(model_folder: Path, script: Script, *, settings: Tree | None = None, **more: object) -> list[Tree]:
    async def test(server: Running) -> list[Tree]:
        answer = await server.http.post(CHAT, json=chat_body(**{"tools": TOOLS, "stream": True, **more}))
        assert answer.status_code == 200, answer.text
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    return with_server(server_settings(model_folder), test, script, **(settings or {}))


def _joined(chunks: Sequence[Tree], choice: int = 0) -> Tree:
    """Return what a client makes of the chunks of a choice."""
    content, thoughts, reasons, calls = "", "", list[str](), dict[int, Tree]()
    for chunk in chunks:
        for one in chunk["choices"]:
            if one["index"] != choice:
                continue
            delta = one["delta"]
            content += delta.get("content") or ""
            thoughts += delta.get("reasoning_content") or ""
            for part in delta.get("tool_calls", ()):
                call = calls.setdefault(part["index"], {"arguments": ""})
                if "id" in part:
                    assert call == {"arguments": ""}
                    assert part["type"] == "function"
                    call |= {"id": part["id"], "name": part["function"]["name"]}
                call["arguments"] += part["function"]["arguments"]
            if one["finish_reason"] is not None:
                reasons.append(one["finish_reason"])
    assert len(reasons) == 1
    return {"content": content, "thoughts": thoughts, "calls": list(calls.values()), "reason": reasons[0]}


def test_a_whole_answer_with_calls(model_folder: Path, codec: TextCodec) -> None:
    answer = _ask(model_folder, _script(codec, f"{CALL}\n{CALL}"), n=2)
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        assert message["content"] is None
        assert [call["function"] for call in message["tool_calls"]] == [{"name": "add", "arguments": ARGUMENTS}] * 2
        ids = {call["id"] for call in message["tool_calls"]}
        assert len(ids) == 2
        assert all(one.startswith("call_") for one in ids)
    openai.types.chat.ChatCompletion.model_validate(answer, strict=True)


@pytest.mark.parametrize("interval", [1, 3])
def test_a_streamed_answer_with_calls(model_folder: Path, codec: TextCodec, interval: int) -> None:
    script = _script(codec, f"Sure. {CALL}", 0.002)
    chunks = _stream(model_folder, script, settings={"stream_interval": interval}, n=2)
    for choice in (0, 1):
        joined = _joined(chunks, choice)
        assert joined["content"] == "Sure. "
        assert joined["reason"] == "tool_calls"
        (call,) = joined["calls"]
        assert (call["name"], call["arguments"]) == ("add", ARGUMENTS)
    parts = [part for chunk in chunks for one in chunk["choices"] for part in one["delta"].get("tool_calls", ())]
    assert parts[0]["function"] == {"name": "add", "arguments": ""}
    assert len(parts) > 6  # the arguments arrive in pieces


def test_a_malformed_call_is_the_same_in_both_forms(model_folder: Path, codec: TextCodec) -> None:
    """Its first pieces are sent before the fault is seen, so it stays a call, and is not announced as complete."""
    text = 'Well. <tool_call>{"name": "add", "arguments": {"a": }}</tool_call>'
    choice = _ask(model_folder, _script(codec, text))["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Well. ", "stop")
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [{"name": "add", "arguments": '{"a": }'}]
    joined = _joined(_stream(model_folder, _script(codec, text, 0.002)))
    assert (joined["content"], joined["reason"]) == ("Well. ", "stop")
    assert [call["arguments"] for call in joined["calls"]] == ['{"a": }']
    text = '<tool_call>{"name": "unknown", "arguments": {"a": 1}}</tool_call>'
    choice = _ask(model_folder, _script(codec, text))["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    joined = _joined(_stream(model_folder, _script(codec, text, 0.002)))
    assert (joined["content"], joined["reason"]) == (text, "stop")


def test_without_tools_or_with_the_choice_none_nothing_is_parsed(model_folder: Path, codec: TextCodec) -> None:
    for more in ({"tools": None}, {"tool_choice": "none"}):
        choice = _ask(model_folder, _script(codec, CALL), **more)["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
    choice = _ask(model_folder, _script(codec, CALL), settings={"tool_call_parser": "none"})["choices"][0]
    assert choice["message"]["content"] == CALL


def test_without_parallel_calls_there_is_one(model_folder: Path, codec: TextCodec) -> None:
    choice = _ask(model_folder, _script(codec, CALL * 3), parallel_tool_calls=False)["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["message"]["content"] is None


@pytest.mark.parametrize(("more", "reason"), [({"max_tokens": 50}, "length"), ({"stop": ["ü"]}, "stop")])
def test_a_cut_call_is_a_part_of_a_call_in_both_forms(
    model_folder: Path, codec: TextCodec, more: Tree, reason: str
) -> None:
    choice = _ask(model_folder, _script(codec, CALL), **more)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, reason)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "add"
    assert ARGUMENTS.startswith(call["function"]["arguments"])
    joined = _joined(_stream(model_folder, _script(codec, CALL, 0.002), **more))
    assert (joined["content"], joined["reason"]) == ("", reason)
    assert [one["arguments"] for one in joined["calls"]] == [call["function"]["arguments"]]


def test_usage_logprobs_and_stop_strings_stay_right(model_folder: Path, codec: TextCodec) -> None:
    num_tokens = len(codec.encode(CALL, add_special_tokens=False)) + 1  # and the end
    more: Tree = {"logprobs": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    chunks = _stream(model_folder, _script(codec, CALL, 0.002), **more)
    assert chunks[-1]["usage"]["completion_tokens"] == num_tokens
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    drawn = [
        token["token"]
        for chunk in chunks
        for one in chunk["choices"]
        for token in (one["logprobs"] or {"content": []})["content"]
    ]
    assert len(drawn) == num_tokens - 1
    whole = _ask(model_folder, _script(codec, CALL), logprobs=True)
    assert [token["token"] for token in whole["choices"][0]["logprobs"]["content"]] == drawn
    assert whole["usage"]["completion_tokens"] == num_tokens
    stopped = _ask(model_folder, _script(codec, f"Hello. {CALL}"), stop=["<tool_"])["choices"][0]
    assert (stopped["message"]["content"], stopped["finish_reason"]) == ("Hello. ", "stop")


def test_thoughts_are_a_field_of_their_own(model_folder: Path, codec: TextCodec) -> None:
    text = f"<think>\nI add.\n</think>\n\nWell. {CALL}"
    style: Tree = {"reasoning_parser": "qwen3"}
    message = _ask(model_folder, _script(codec, text), settings=style)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("I add.", "Well. ")
    assert len(message["tool_calls"]) == 1
    joined = _joined(_stream(model_folder, _script(codec, text, 0.002), settings=style))
    assert (joined["thoughts"], joined["content"], joined["reason"]) == ("I add.", "Well. ", "tool_calls")
    message = _ask(model_folder, _script(codec, text), settings=style, include_reasoning=False)["choices"][0]["message"]
    assert "reasoning_content" not in message
    prompt_thinks: Tree = {"chat_template_kwargs": {"enable_thinking": True}, "tools": None}
    message = _ask(model_folder, _script(codec, "I add.</think>3"), settings=style, **prompt_thinks)["choices"][0]
    assert (message["message"]["reasoning_content"], message["message"]["content"]) == ("I add.", "3")


def test_marks_that_are_special_tokens_are_seen(model_folder: Path, tmp_path: Path) -> None:
    """`[TOOL_CALLS]` and the like are special tokens, which are hidden from content."""
    from tokenizers import AddedToken

    from tests.server.builders import build_byte_level
    from tiercel.server.text.tokenizer import load_text_codec

    tokenizer = build_byte_level()
    tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True, normalized=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text((model_folder / "tokenizer_config.json").read_text())
    codec = load_text_codec(tmp_path)
    script = _script(codec, "[TOOL_CALLS]add{}")
    message = _ask(tmp_path, script, settings={"tool_call_parser": "mistral"})["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": "{}"}
    assert len(call["id"]) == 9
    plain = _ask(tmp_path, script, settings={"tool_call_parser": "mistral"}, tools=None)["choices"][0]["message"]
    assert plain["content"] == "add{}"


RESULT: Tree = {"role": "tool", "tool_call_id": "a", "content": "3"}
ASSISTANT: Tree = {
    "role": "assistant",
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
}


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"tools": [TOOLS[0]] * 129}, "tools", "at most 128"),
        ({"tools": [TOOLS[0]] * 2}, "tools", "same name"),
        ({"tools": [{"type": "retrieval"}]}, "tools", "expected 'function'"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools", "a string that matches"),
        ({"tools": [{"type": "function", "function": {"name": "a", "description": "x" * 300_000}}]}, "tools", "262144"),
        ({"tool_choice": "some"}, "tool_choice", "must be"),
        ({"tool_choice": {"type": "function", "function": {"name": "unknown"}}}, "tool_choice", "not in tools"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "missing"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}, "tool_choice", "list"),
        ({"tool_choice": 5}, "tool_choice", "a string or an object"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "true or false"),
        ({"verbosity": "loud"}, "verbosity", "expected 'low'"),
        ({"messages": [RESULT]}, "messages", "no call"),
        ({"messages": [ASSISTANT, {**RESULT, "tool_call_id": "b"}]}, "messages", "no call"),
        ({"messages": [{**ASSISTANT, "role": "user", "content": "x"}]}, "messages", "assistant"),
        ({"messages": [{"role": "user", "content": "x", "prefix": True}]}, "messages", "prefix"),
        ({"functions": [{"name": "f"}]}, "functions", "not supported"),
    ],
)
def test_refusals_name_the_field(model_folder: Path, change: Tree, param: str, words: str) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(CHAT, json=chat_body(**{"tools": TOOLS, **change}))
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert words in error["message"]

    with_server(server_settings(model_folder), test)


def test_deep_arguments_of_a_message_are_refused(model_folder: Path) -> None:
    deep = '{"a":' * 70 + "1" + "}" * 70
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": deep}}

    async def test(server: Running) -> None:
        messages = [{"role": "assistant", "tool_calls": [call]}]
        answer = await server.http.post(CHAT, json={**chat_body(), "messages": messages})
        assert answer.status_code == 400
        assert "64 levels" in answer.json()["error"]["message"]

    with_server(server_settings(model_folder), test)


def test_the_openai_client_runs_a_loop_of_tools(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        def loop() -> None:
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
                messages: list[Any] = [{"role": "user", "content": "1 + 2?"}]
                tools: Any = TOOLS
                for _ in range(2):
                    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
                    message = answer.choices[0].message
                    assert message.tool_calls is not None
                    messages.append(message)
                    for call in message.tool_calls:
                        assert call.type == "function"
                        result = str(json.loads(call.function.arguments)["a"])
                        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
                with client.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as stream:
                    final = stream.until_done().get_final_completion()
                calls = final.choices[0].message.tool_calls
                assert calls is not None
                assert calls[0].function.arguments == ARGUMENTS

        await asyncio.to_thread(loop)
        prompt = codec.decode(list(unpack_tokens(server.engine.submitted[-1].prompt)))
        assert prompt.count("<tool_response>") == 2
        assert prompt.count('"description": "Adds."') == 1

    with_server(server_settings(model_folder), test, _script(codec, CALL, 0.001))
