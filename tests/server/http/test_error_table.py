"""The error table: status, OpenAI body, words of the message, and nothing left behind."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.server.fake_engine import Script
from tests.server.harness import MODEL, Running, chat_body, server_settings, text_body, until, with_server
from tiercel.server.api.schemas.chat import ChatFields
from tiercel.server.api.schemas.fields import read_fields
from tiercel.values.errors import AdmissionError

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
NAN = float("nan")

ROWS: list[tuple[str, dict[str, object], int, str | None, str]] = [
    # route, body, status, param, words of the message
    (CHAT, chat_body("word " * 300), 400, "input_tokens", "maximum context length is 256 tokens"),
    (TEXT, text_body([1] * 256), 400, "input_tokens", "your prompt contains 256 input tokens"),
    (TEXT, text_body("hello", max_tokens=300), 400, "max_tokens", "maximum context length"),
    (CHAT, chat_body(max_completion_tokens=300), 400, "max_completion_tokens", "300"),
    (CHAT, {**chat_body(), "model": "other"}, 404, "model", "The model `other` does not exist. Valid aliases: `tiny`"),
    (TEXT, {**text_body(), "model": "other"}, 404, "model", "does not exist"),
    (CHAT, {"model": MODEL}, 400, "messages", "messages"),
    (CHAT, chat_body(temperature="hot"), 400, "temperature", "temperature"),
    (CHAT, {"model": MODEL, "messages": "hello"}, 400, "messages", "list"),
    (CHAT, {"model": MODEL, "messages": []}, 400, "messages", "at least"),
    (CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "x"}] * 2049}, 400, "messages", "at most"),
    (CHAT, {"model": MODEL, "messages": [{"role": "wizard", "content": "x"}]}, 400, "messages", "only system, user"),
    (CHAT, {"model": MODEL, "messages": [{"role": "a<b>", "content": "x"}]}, 400, "messages", "a string that matches"),
    (CHAT, {"model": MODEL, "messages": [{"role": "user"}]}, 400, "messages", "missing"),
    (TEXT, text_body(""), 400, "prompt", "The prompt must not be empty: a text or a list of token ids is required."),
    (TEXT, text_body([]), 400, "prompt", "must not be empty"),
    (TEXT, text_body(["a", ""]), 400, "prompt", "must not be empty"),
    (TEXT, text_body([[1], []]), 400, "prompt", "must not be empty"),
    (TEXT, {"model": MODEL}, 400, "prompt", "must not be empty"),
    (TEXT, text_body(5), 400, "prompt", "prompt must be"),
    (TEXT, text_body([1, "a"]), 400, "prompt", "prompt must be"),
    (TEXT, text_body([True, False]), 400, "prompt", "prompt must be"),
    (TEXT, text_body(["a"] * 4097), 400, "prompt", "4096"),
    (TEXT, text_body([1, 1024]), 400, "prompt", "out of vocabulary"),
    (TEXT, text_body([-1]), 400, "prompt", "out of vocabulary"),
    (TEXT, text_body([10**30]), 400, "prompt", "out of vocabulary"),
    (CHAT, chat_body(max_tokens=0), 400, "max_tokens", "max_tokens must be at least 1"),
    (CHAT, chat_body(max_completion_tokens=-5), 400, "max_completion_tokens", "must be at least 1"),
    (TEXT, text_body(logprobs=21), 400, "logprobs", "max allowed: 20"),
    (CHAT, chat_body(logprobs=True, top_logprobs=21), 400, "top_logprobs", "max allowed: 20"),
    (CHAT, chat_body(top_logprobs=2), 400, "top_logprobs", "`logprobs` must be set to true"),
    (CHAT, chat_body(stream_options={"include_usage": True}), 400, "stream_options", "stream"),
    (CHAT, chat_body(tools=[]), 400, "tools", "at least"),
    (CHAT, chat_body(tool_choice="auto"), 400, "tool_choice", "together with tools"),
    (
        CHAT,
        chat_body(response_format={"type": "json_schema"}),
        400,
        "response_format",
        "When response_format type is 'json_schema', the 'json_schema' field must be provided.",
    ),
    (TEXT, text_body(suffix="x"), 400, "suffix", "no fill-in-the-middle tokens"),
    (CHAT, chat_body(seed=2**63), 400, "seed", "expected at most"),
    (CHAT, chat_body(seed=-(2**63) - 1), 400, "seed", "expected at least"),
    (CHAT, chat_body(n=129), 400, "n", "expected at most"),
    (CHAT, chat_body(n=0), 400, "n", "expected at least"),
    (CHAT, chat_body(top_p=-0.5), 400, "top_p", "expected at least"),
    (CHAT, chat_body(top_p=1.5), 400, "top_p", "expected at most"),
    (CHAT, chat_body(temperature=-1), 400, "temperature", "expected at least"),
    (CHAT, chat_body(presence_penalty=3), 400, "presence_penalty", "expected at most"),
    (CHAT, chat_body(stop=["a"] * 5), 400, "stop", "stop"),
    (CHAT, chat_body(stop="x" * 257), 400, "stop", "stop"),
    (CHAT, chat_body(stop=""), 400, "stop", "stop"),
    (CHAT, chat_body(stop_token_ids=[1024]), 400, "stop_token_ids", "out of vocabulary"),
    (CHAT, chat_body(logit_bias={"1024": 1}), 400, "logit_bias", "out of vocabulary"),
    (CHAT, chat_body(logit_bias={"5": 101}), 400, "logit_bias", "between -100 and 100"),
    (CHAT, chat_body(logit_bias={"five": 1}), 400, "logit_bias", "token id"),
    (CHAT, chat_body(logit_bias={str(token): 1 for token in range(301)}), 400, "logit_bias", "at most"),
    (CHAT, chat_body(min_tokens=9, max_tokens=8), 400, "min_tokens", "min_tokens must be less than or equal"),
    (CHAT, chat_body(min_tokens=1000), 400, "min_tokens", "min_tokens must be less than or equal"),
    (CHAT, chat_body(cache_salt="no spaces"), 400, "cache_salt", "a string that matches"),
    (CHAT, chat_body(chat_template_kwargs={"enable_thinking": "x"}), 400, "chat_template_kwargs", "true or false"),
    (CHAT, chat_body(continue_final_message=True), 400, "continue_final_message", "Cannot set both"),
    (
        CHAT,
        {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        400,
        "messages",
        "image_url is not supported",
    ),
    (CHAT, {"model": MODEL, "messages": [{"role": "tool", "content": "x"}]}, 400, "messages", "needs tool_call_id"),
    (
        CHAT,
        {"model": MODEL, "messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        400,
        "messages",
        "messages.0.tool_calls.0.function: this field is required",
    ),
    *[
        (TEXT, text_body(**{name: value}), 400, name, f"{name} is not supported")
        for name, value in [
            ("use_beam_search", True),
            ("prompt_embeds", "x"),
            ("audio", {}),
            ("guided_something", 1),
            ("chat_template", "x"),
            ("documents", []),
            ("functions", []),
            ("logprob_token_ids", [5]),
        ]
    ],
    (CHAT, chat_body(echo=True), 400, "echo", "echo is not supported"),
    (CHAT, chat_body(logprob_token_ids=[5]), 400, "logprob_token_ids", "logprob_token_ids is not supported"),
    *[
        (TEXT, text_body(**{name: value}), 400, name, words)
        for name, value, words in [
            ("max_tokens", "1", "an integer"),
            ("max_tokens", True, "an integer"),
            ("max_tokens", 1.0, "an integer"),
            ("n", "1", "an integer"),
            ("seed", 1.0, "an integer"),
            ("logprobs", True, "an integer"),
            ("stop_token_ids", [True], "stop_token_ids.0: expected an integer"),
            ("temperature", "1", "a number"),
            ("temperature", True, "a number"),
            ("logit_bias", {"5": "1"}, "logit_bias.5: expected a number"),
            ("stream", 1, "true or false"),
            ("ignore_eos", "true", "true or false"),
            ("stop", 5, "stop: expected a string or a list"),
            ("stream_options", 5, "stream_options: expected an object"),
        ]
    ],
    *[
        (CHAT, {"model": MODEL, "messages": [{"role": "user", "content": content}]}, 400, "messages", words)
        for content, words in [
            (5, "messages.0.content: expected a string or a list"),
            ([5], "messages.0.content.0: expected an object"),
            ([{"text": "x"}], "a content part without a type"),
            ([{"type": 5}], "a content part whose type is not a text"),
            ([{"type": "x-image\n"}], "a content part of type x-image? is not supported"),
        ]
    ],
    (CHAT, {"model": MODEL, "messages": ["x"]}, 400, "messages", "messages.0: expected an object"),
    ("/tokenize", {"prompt": 5}, 400, "prompt", "prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "chat_template": "x"}, 400, "chat_template", "not"),
    ("/detokenize", {"tokens": [1024]}, 400, "tokens", "out of vocabulary"),
    ("/detokenize", {"tokens": ["a"]}, 400, "tokens", "tokens"),
]


def test_bad_requests_get_openai_errors_and_leave_nothing_behind(model_folder: Path) -> None:
    async def test(server: Running) -> list[str]:
        faults: list[str] = []
        for route, body, status, param, words in ROWS:
            answer = await server.http.post(route, json=body)
            error = answer.json()["error"]
            is_right = (
                answer.status_code == status
                and set(error) == {"message", "type", "param", "code"}
                and error["param"] == param
                and words in error["message"]
                and isinstance(error["code"], str)
                and len(error["message"]) < 800
            )
            if not is_right:
                faults.append(f"{route} {str(body)[:80]} -> {answer.status_code} {answer.text}")
        assert server.engine.submitted == []
        assert server.context.client.sequences.num_unfinished == 0
        assert server.context.admission.num_reserved == 0
        return faults

    assert with_server(server_settings(model_folder), test) == []


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        ("", "stop: expected a string with a length of at least 1"),
        ("x" * 257, "stop: expected a string with a length of at most 256"),
        (["a", ""], "stop.1: expected a string with a length of at least 1"),
        (["a", 5], "stop.1: expected a string"),
    ],
)
def test_an_error_of_stop_speaks_of_the_given_type_only(stop: object, words: str) -> None:
    with pytest.raises(AdmissionError) as refusal:
        read_fields(ChatFields, chat_body(stop=stop))
    assert refusal.value.message == words


NAMED_FAULTS = [
    # body, code, param, words of the message
    (b'{"max_tokens": ' + b"9" * 5000 + b"}", "invalid_value", "max_tokens", "max_tokens: the number is out of range"),
    (b'{"seed": -' + b"9" * 9000 + b"}", "invalid_value", "seed", "seed: the number is out of range"),
    (b'{"a": {"b": [0, 1e999]}}', "invalid_value", "a", "a.b.1: the number is out of range"),
    (
        b'{"seed": ' + b"9" * 40 + b', "messages": [{"role": "user", "content": "x"}]}',
        "invalid_value",
        "seed",
        "seed: ",
    ),
    (b'{"n": 1, "x": ":", "n": 2}', "invalid_value", "n", "n: the name is given more than once"),
    (b'{"n": 1, "\\u006e": 2}', "invalid_value", "n", "n: the name is given more than once"),
    (b'{"messages": [{"role": "user", "role": "system"}]}', "invalid_value", "messages", "messages.0.role: the name"),
    (b'{"x": ' + b"[" * 70 + b"]" * 70 + b"}", "invalid_json", "x", "x: the body nests deeper than 64 levels"),
    (
        b'{"n": 1, "logit_bias": {' + b'"5": [],' * 20_000 + b'"6": 1}}',
        "body_too_complex",
        "logit_bias",
        "logit_bias: ",
    ),
]


def test_faults_that_the_decoder_cannot_name_are_named(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for body, code, param, words in NAMED_FAULTS:
            answer = await server.http.post(CHAT, content=body, headers={"content-type": "application/json"})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, code, param), body[:60]
            assert words in error["message"]

    with_server(server_settings(model_folder), test)


def test_colons_in_texts_are_no_names(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for text in ('a: b "c": d', '\\": {"x": 1, "x": 2}', "::::\\"):
            assert (await server.http.post(CHAT, json=chat_body(text, max_tokens=1))).status_code == 200

    with_server(server_settings(model_folder), test)


def test_codes_are_those_of_openai(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        async def code(body: dict[str, object]) -> str:
            return (await server.http.post(CHAT, json=body)).json()["error"]["code"]

        assert await code(chat_body("word " * 300)) == "context_length_exceeded"
        assert await code(chat_body(max_tokens=300)) == "context_length_exceeded"
        assert await code({**chat_body(), "model": "x"}) == "model_not_found"
        assert await code(chat_body(functions=[])) == "unsupported_parameter"

    with_server(server_settings(model_folder), test)


NOT_OBJECTS = [
    b"",
    b"{",
    b"[]",
    b'"text"',
    b"null",
    b'{"a": NaN}',
    b'{"a": "\xff"}',
    b'{"a": "\\ud800"}',
    b'{"a": ' + b"[" * 65 + b"]" * 65 + b"}",
    b"[" * 10_000,
    b'{"a":' * 3_000,
]


def test_a_body_that_is_not_a_json_object_is_refused(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for body in NOT_OBJECTS:
            answer = await server.http.post(CHAT, content=body, headers={"content-type": "application/json"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json"), body[:20]

    with_server(server_settings(model_folder), test)


def test_another_content_type_is_refused(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        body = json.dumps(chat_body()).encode()
        for headers in ({"content-type": "text/plain"}, {}):
            answer = await server.http.post(CHAT, content=body, headers=headers)
            assert answer.status_code == 400
            expected = "Unsupported Media Type: Only 'application/json' is allowed"
            assert answer.json()["error"]["message"] == expected
        good = await server.http.post(CHAT, content=body, headers={"content-type": "Application/JSON; charset=utf-8"})
        assert good.status_code == 200

    with_server(server_settings(model_folder), test)


def test_a_body_over_the_limit_is_refused_by_its_header_and_by_its_bytes(model_folder: Path) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 100

    async def test(server: Running) -> None:
        json_type = {"content-type": "application/json"}
        declared = await server.http.post(CHAT, content=b" " * 2001, headers=json_type)
        streamed = await server.http.post(CHAT, content=chunks(), headers=json_type)
        for answer in (declared, streamed):
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "request_too_large"

    with_server(server_settings(model_folder), test, max_body_bytes=2000)


def test_unknown_routes_and_methods_answer_in_the_same_shape(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        missing = await server.http.get("/v2/nothing")
        wrong = await server.http.get(TEXT)
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
        assert wrong.headers["allow"] == "POST"
        unknown_model = await server.http.get("/v1/models/other/name")
        assert (unknown_model.status_code, unknown_model.json()["error"]["code"]) == (404, "model_not_found")

    with_server(server_settings(model_folder), test)


def test_the_allow_header_has_every_method_of_the_path(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        paths = ("/admin/config", "/ping", TEXT, "/metrics", "/ui", "/ui/data", "/v1/models/any/name")
        allowed = {path: (await server.http.delete(path)).headers["allow"] for path in paths}
        reads = dict.fromkeys(("/metrics", "/ui", "/ui/data", "/v1/models/any/name"), "GET, HEAD")
        assert allowed == {"/admin/config": "GET, HEAD, PATCH", "/ping": "GET, HEAD, POST", TEXT: "POST", **reads}

    with_server(server_settings(model_folder), test)


def test_a_request_larger_than_the_kv_pool_is_refused_with_the_size_of_the_pool(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(TEXT, json=text_body([5] * 30, max_tokens=40))
        assert answer.status_code == 400
        assert "KV pool, which holds 64 tokens" in answer.json()["error"]["message"]
        fits = await server.http.post(TEXT, json=text_body([5] * 30, max_tokens=34))
        assert fits.status_code == 200

    with_server(server_settings(model_folder), test, Script(blocks_total=4, max_model_len=1000))


def test_the_error_names_the_pool_if_the_engine_cut_the_context_to_it(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for body, param in ((text_body([5] * 64), "input_tokens"), (text_body([5] * 30, max_tokens=40), "max_tokens")):
            error = (await server.http.post(TEXT, json=body)).json()["error"]
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)
            assert "maximum context length is 64 tokens" in error["message"]
            assert "KV pool, which holds 64 tokens" in error["message"]

    with_server(server_settings(model_folder), test, Script(blocks_total=4, max_model_len=64))


def test_the_error_does_not_name_the_pool_if_the_model_sets_the_limit(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(TEXT, json=text_body([5] * 256))
        assert "KV pool" not in answer.text

    with_server(server_settings(model_folder), test)


def test_text_with_tokens_beyond_the_models_vocabulary_is_refused(model_folder: Path) -> None:
    """The tokenizer's added tokens start at 400; the model has logits for the tokens below."""

    async def test(server: Running) -> None:
        for route, body, param in (
            (TEXT, text_body("hi <think>"), "prompt"),
            (TEXT, text_body(["fine", "covid19"]), "prompt"),
            (CHAT, chat_body("hi covid19"), "messages"),
            (CHAT, chat_body("hi", chat_template_kwargs={"enable_thinking": True}), "messages"),
            ("/tokenize", text_body("hi <think>"), "prompt"),
            ("/tokenize", chat_body("covid19"), "messages"),
        ):
            answer = await server.http.post(route, json=body)
            assert answer.status_code == 400, (route, body)
            assert answer.json()["error"]["param"] == param
            assert "out of vocabulary" in answer.json()["error"]["message"]
        assert server.engine.submitted == []
        for route, body in ((TEXT, text_body("hi")), (CHAT, chat_body("hi <think>"))):
            assert (await server.http.post(route, json=body)).status_code == 200

    with_server(server_settings(model_folder), test, Script(vocab_size=400))


def test_a_request_with_more_sequences_than_the_queue_is_refused_without_retry(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for body, param in ((text_body(n=5), "n"), (text_body(["a"] * 5), "prompt"), (text_body(["a"] * 2, n=3), "n")):
            answer = await server.http.post(TEXT, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
            assert "queue of this server holds 4" in answer.json()["error"]["message"]
            assert "retry-after" not in answer.headers
        assert (await server.http.post(TEXT, json=text_body(["a"] * 2, n=2))).status_code == 200

    with_server(server_settings(model_folder), test, max_num_queued_reqs=4)


def test_a_full_queue_is_refused_before_any_work(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(server.http.post(TEXT, json=text_body(max_tokens=1)))
            second = group.create_task(server.http.post(TEXT, json=text_body(max_tokens=1)))
            await until(lambda: server.context.client.sequences.num_tokenless == 2)
            refused = await server.http.post(TEXT, json=text_body())
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "overloaded"
            assert int(refused.headers["retry-after"]) >= 1
        assert (first.result().status_code, second.result().status_code) == (200, 200)
        assert len(server.engine.submitted) == 2

    with_server(server_settings(model_folder), test, Script(step_s=0.3), max_num_queued_reqs=2)


def test_a_sequence_that_the_engine_fails_is_an_error_without_details(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(TEXT, json=text_body([7, 8]))
        assert answer.status_code == 500
        assert "secret" not in answer.text
        assert "error id" in answer.json()["error"]["message"]
        fine = await server.http.post(TEXT, json=text_body([8]))
        assert fine.status_code == 200

    with_server(server_settings(model_folder), test, Script(fail_prompt_with=7))


def test_default_values_of_unsupported_fields_are_accepted(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(
            CHAT,
            json=chat_body(
                tools=None,
                tool_choice="none",
                response_format={"type": "text"},
                best_of=1,
                bad_words=[],
                user="someone",
                store=True,
                metadata={"a": "b"},
                completely_unknown=[1],
                max_tokens=2,
            ),
        )
        assert answer.status_code == 200

    with_server(server_settings(model_folder), test)


def test_head_is_answered_wherever_get_is(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for path in ("/metrics", "/health", "/ready", "/version", "/v1/models", "/v1/models/tiny", "/ui", "/ui/data"):
            head, get = await server.http.head(path), await server.http.get(path)
            assert (head.status_code, head.content) == (200, b""), path
            assert head.headers["content-type"] == get.headers["content-type"]
        assert (await server.http.head("/v2/nothing")).status_code == 404
        assert (await server.http.head(TEXT)).headers["allow"] == "POST"

    with_server(server_settings(model_folder), test)
