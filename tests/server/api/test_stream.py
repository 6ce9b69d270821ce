"""The contract of event streams, byte by byte."""

import json
from pathlib import Path
from typing import Any

from tests.server.fake_engine import Script
from tests.server.harness import Running, chat_body, server_settings, text_body, until, with_server
from tiercel.server.text.tokenizer import TextCodec

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def _events(body: str) -> list[dict[str, Any]]:
    """Check the framing; return the JSON of all events before [DONE]."""
    assert body.endswith("data: [DONE]\n\n")
    frames = body.removesuffix("data: [DONE]\n\n").split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: {") and "\n" not in frame for frame in frames)
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def _ids(codec: TextCodec, text: str) -> tuple[int, ...]:
    return tuple(codec.encode(text, add_special_tokens=False))


def test_a_chat_stream_has_role_text_finish_and_done(model_folder: Path, codec: TextCodec) -> None:
    reply = _ids(codec, "Hello world")

    async def test(server: Running) -> None:
        answer = await server.http.post(CHAT, json=chat_body(stream=True, max_tokens=len(reply)))
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = _events(answer.text)
        assert events[0]["choices"] == [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ]
        assert len({event["id"] for event in events}) == 1
        assert events[0]["id"].startswith("chatcmpl-")
        assert len(events[0]["id"]) == len("chatcmpl-") + 32
        assert {(event["object"], event["model"]) for event in events} == {("chat.completion.chunk", "tiny")}
        assert len({event["created"] for event in events}) == 1
        assert all("usage" not in event for event in events)
        assert ["system_fingerprint" in event for event in events] == [*[False] * (len(events) - 1), True]
        text = "".join(event["choices"][0]["delta"]["content"] for event in events)
        assert text == "Hello world"
        assert [event["choices"][0]["finish_reason"] for event in events][-1] == "length"
        assert [event["choices"][0]["finish_reason"] for event in events].count(None) == len(events) - 1
        assert events[-1]["choices"][0]["delta"]["content"] != ""

    with_server(server_settings(model_folder), test, Script(reply=reply, step_s=0.01))


def test_usage_comes_in_one_extra_chunk(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        body = chat_body(stream=True, max_tokens=3, stream_options={"include_usage": True})
        events = _events((await server.http.post(CHAT, json=body)).text)
        assert events[-1]["choices"] == []
        usage = events[-1]["usage"]
        assert usage == {
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": 3,
            "total_tokens": usage["prompt_tokens"] + 3,
            "prompt_tokens_details": {"cached_tokens": 5},
        }
        assert all(event["usage"] is None for event in events[:-1])

    with_server(server_settings(model_folder), test, Script(cached=5))


def test_continuous_usage_rises_strictly(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = chat_body(stream=True, max_tokens=6, stream_options=options)
        events = _events((await server.http.post(CHAT, json=body)).text)
        counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
        assert counts == sorted(set(counts))
        assert (counts[0], counts[-1]) == (0, 6)
        assert events[-1]["usage"]["completion_tokens"] == 6

    with_server(server_settings(model_folder), test, Script(step_s=0.01))


def test_a_text_stream_has_no_role_and_one_finish_reason(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        body = text_body([5, 6, 7], stream=True, max_tokens=6)
        events = _events((await server.http.post(TEXT, json=body)).text)
        assert {event["object"] for event in events} == {"text_completion"}
        assert all(event["id"].startswith("cmpl-") for event in events)
        assert all(set(event["choices"][0]) >= {"index", "text", "logprobs", "finish_reason"} for event in events)
        assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["length"]

    with_server(server_settings(model_folder), test, Script(step_s=0.005))


def test_choices_interleave_and_each_ends_once(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        body = chat_body(stream=True, n=3, max_tokens=5)
        events = _events((await server.http.post(CHAT, json=body)).text)
        assert all(len(event["choices"]) == 1 for event in events)
        by_choice = {index: [e for e in events if e["choices"][0]["index"] == index] for index in range(3)}
        for chunks in by_choice.values():
            assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
            assert sum(chunk["choices"][0]["finish_reason"] == "length" for chunk in chunks) == 1
        assert len({request.params.seed for request in server.engine.submitted}) == 3

    with_server(server_settings(model_folder), test, Script(step_s=0.005))


def test_a_character_is_never_split(model_folder: Path, codec: TextCodec) -> None:
    text = "🙂 naïve 𐍈 👩‍🚀"
    reply = _ids(codec, text)

    async def test(server: Running) -> None:
        body = text_body(stream=True, max_tokens=len(reply))
        events = _events((await server.http.post(TEXT, json=body)).text)
        parts = [event["choices"][0]["text"] for event in events]
        assert "".join(parts) == text
        assert not any("\ufffd" in part for part in parts)

    with_server(server_settings(model_folder), test, Script(reply=reply, step_s=0.002))


def test_a_stop_string_ends_the_stream_and_aborts_the_sequence(model_folder: Path, codec: TextCodec) -> None:
    reply = _ids(codec, "one two three four five six")

    async def test(server: Running) -> None:
        for stream in (True, False):
            body = chat_body(stream=stream, max_tokens=100, stop=["e f", "zzz"])
            answer = await server.http.post(CHAT, json=body)
            if stream:
                events = _events(answer.text)
                text = "".join(event["choices"][0]["delta"]["content"] for event in events)
                last = events[-1]["choices"][0]
            else:
                last = answer.json()["choices"][0]
                text = last["message"]["content"]
                assert 0 < answer.json()["usage"]["completion_tokens"] < len(reply)
                assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
            assert (text, last["finish_reason"], last["stop_reason"]) == ("one two thre", "stop", "e f")
        await _until_idle(server)
        assert [reason.value for _, reason in server.engine.aborted] == ["stop", "stop"]

    with_server(server_settings(model_folder), test, Script(reply=reply, step_s=0.005, cached=2))


def test_a_stop_token_is_counted_but_not_shown(model_folder: Path, codec: TextCodec) -> None:
    end = codec.encode("</s>", add_special_tokens=False)[0]
    reply = (*_ids(codec, "bye"), end)

    async def test(server: Running) -> None:
        answer = (await server.http.post(CHAT, json=chat_body(skip_special_tokens=False))).json()
        choice = answer["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": "bye", "refusal": None}
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        assert answer["usage"]["completion_tokens"] == len(reply)
        asked = (await server.http.post(CHAT, json=chat_body(stop_token_ids=[reply[1]], ignore_eos=True))).json()
        assert (asked["choices"][0]["finish_reason"], asked["choices"][0]["stop_reason"]) == ("stop", reply[1])

    with_server(server_settings(model_folder), test, Script(reply=reply, end_token=end))


def test_a_stop_token_is_shown_with_include_stop_str_in_output(model_folder: Path, codec: TextCodec) -> None:
    end = codec.encode("</s>", add_special_tokens=False)[0]
    reply = (*_ids(codec, "bye"), end)

    async def test(server: Running) -> None:
        async def answer(**fields: object) -> tuple[str, str, object, int]:
            asked = {**chat_body(include_stop_str_in_output=True), **fields}
            body = (await server.http.post(CHAT, json=asked)).json()
            choice, usage = body["choices"][0], body["usage"]
            content = choice["message"]["content"]
            return content, choice["finish_reason"], choice["stop_reason"], usage["completion_tokens"]

        shown = codec.decode([reply[0], reply[1]])
        assert await answer(stop_token_ids=[reply[1]], ignore_eos=True) == (shown, "stop", reply[1], 2)
        assert await answer() == ("bye", "stop", None, len(reply))
        assert await answer(skip_special_tokens=False) == ("bye</s>", "stop", None, len(reply))

    with_server(server_settings(model_folder), test, Script(reply=reply, end_token=end))


def test_top_logprobs_of_text_completions_are_sorted(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(TEXT, json=text_body([40], max_tokens=2, logprobs=4))
        for alternatives in answer.json()["choices"][0]["logprobs"]["top_logprobs"]:
            assert list(alternatives.values()) == [-0.5, -1.5, -2.5, -3.5]
        answer = await server.http.post(TEXT, json=text_body([40], max_tokens=1, logprobs=0))
        assert list(answer.json()["choices"][0]["logprobs"]["top_logprobs"][0].values()) == [-0.5]

    with_server(server_settings(model_folder), test)


def test_log_probabilities_of_chat_and_text(model_folder: Path, codec: TextCodec) -> None:
    reply = _ids(codec, "Hi 🙂")

    async def test(server: Running) -> None:
        tokens = len(reply)
        chat = (await server.http.post(CHAT, json=chat_body(max_tokens=tokens, logprobs=True, top_logprobs=2))).json()
        content = chat["choices"][0]["logprobs"]["content"]
        assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "Hi 🙂"
        assert [len(entry["top_logprobs"]) for entry in content] == [2] * tokens
        assert {entry["logprob"] for entry in content} == {-0.5}
        text = (await server.http.post(TEXT, json=text_body(max_tokens=tokens, logprobs=2))).json()
        logprobs = text["choices"][0]["logprobs"]
        assert set(logprobs) == {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
        assert {len(column) for column in logprobs.values()} == {tokens}
        body = text_body(max_tokens=tokens, logprobs=0, stream=True)
        streamed = _events((await server.http.post(TEXT, json=body)).text)
        offsets = [o for event in streamed for o in event["choices"][0]["logprobs"]["text_offset"]]
        assert offsets == logprobs["text_offset"]

    with_server(server_settings(model_folder), test, Script(reply=reply))


def test_a_whole_answer_carries_every_field(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        chat = (await server.http.post(CHAT, json=chat_body(max_tokens=2, model="alias"))).json()
        head = {"id", "object", "created", "model", "choices", "usage", "system_fingerprint", "service_tier"}
        assert set(chat) == head | {"prompt_logprobs", "prompt_token_ids", "kv_transfer_params"}
        assert chat["model"] == "alias"
        choice = {"index", "logprobs", "finish_reason", "stop_reason", "token_ids"}
        assert set(chat["choices"][0]) == choice | {"message"}
        assert set(chat["choices"][0]["message"]) == {"role", "content", "refusal"}
        text = (await server.http.post(TEXT, json=text_body(["a", "b"], n=2))).json()
        assert [choice["index"] for choice in text["choices"]] == [0, 1, 2, 3]
        assert set(text) == head | {"kv_transfer_params"}
        assert set(text["choices"][0]) == choice | {"text", "prompt_logprobs", "prompt_token_ids"}
        assert text["usage"]["completion_tokens"] == 64
        assert text["usage"]["prompt_tokens"] == 4

    with_server(server_settings(model_folder), test)


def test_a_dead_engine_in_mid_stream_is_an_error_event(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(CHAT, json=chat_body(stream=True))
        assert answer.status_code == 200
        events = _events(answer.text)
        assert set(events[-1]) == {"error"}
        assert set(events[-1]["error"]) == {"message", "type", "param", "code"}
        assert events[-1]["error"]["code"] == "engine_dead"
        assert events[-2]["choices"][0]["delta"]["content"] != ""

    with_server(server_settings(model_folder), test, Script(die_at_step=3, step_s=0.02))


def test_a_failure_before_the_first_token_has_its_own_status(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(TEXT, json=text_body([7], stream=True))
        assert answer.status_code == 500
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["error"]["code"] == "engine_error"

    with_server(server_settings(model_folder), test, Script(fail_prompt_with=7))


def test_comments_keep_a_slow_stream_alive(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(TEXT, json=text_body(stream=True, max_tokens=2))
        assert answer.text.startswith(": keep-alive\n\n")
        assert answer.text.endswith("data: [DONE]\n\n")

    with_server(server_settings(model_folder), test, Script(step_s=0.3), sse_keep_alive_interval_s=0.1)


def test_comments_come_between_the_events_of_a_slow_stream(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(TEXT, json=text_body(stream=True, max_tokens=3))
        first, second = (answer.text.index(f'"text":"{text}"') for text in _texts(answer.text)[:2])
        assert ": keep-alive\n\n" in answer.text[first:second]

    with_server(server_settings(model_folder), test, Script(step_s=0.3), sse_keep_alive_interval_s=0.1)


def _texts(body: str) -> list[str]:
    events = _events(body.replace(": keep-alive\n\n", ""))
    return [event["choices"][0]["text"] for event in events]


def test_a_stream_interval_joins_tokens(model_folder: Path, codec: TextCodec) -> None:
    reply = _ids(codec, "abcdefgh" * 4)

    async def test(server: Running) -> None:
        body = text_body(stream=True, max_tokens=9)
        events = _events((await server.http.post(TEXT, json=body)).text)
        assert len(events) == 3

    with_server(server_settings(model_folder), test, Script(reply=reply, step_s=0.01), stream_interval=4)


def test_letters_that_look_like_line_ends_are_escaped(model_folder: Path, codec: TextCodec) -> None:
    reply = _ids(codec, "a\u2028b\u0085c")

    async def test(server: Running) -> None:
        answer = await server.http.post(TEXT, json=text_body(stream=True, max_tokens=len(reply)))
        assert "\u2028" not in answer.text
        assert "".join(event["choices"][0]["text"] for event in _events(answer.text)) == "a\u2028b\u0085c"

    with_server(server_settings(model_folder), test, Script(reply=reply))


async def _until_idle(server: Running) -> None:
    await until(lambda: server.context.client.sequences.num_unfinished == 0)
