"""Fields that act on sampling or service, and fields that are ignored, as the engine and the client see them."""

from pathlib import Path

import pytest

from tests.server.api.test_prompt_answers import answer_of, events_of, refusal_of
from tests.server.fake_engine import Script
from tests.server.harness import Running, chat_body, server_settings, text_body, with_server
from tiercel.server.text.tokenizer import TextCodec

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"


def test_bad_words_are_banned_at_the_start_of_a_text_and_behind_a_space(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        await answer_of(server, TEXT, text_body(bad_words=["fox", "naïve café"], max_tokens=1))
        words = server.engine.submitted[0].params.bad_words
        assert tuple(codec.encode("fox", add_special_tokens=False)) in words
        assert tuple(codec.encode("naïve café", add_special_tokens=False)) in words
        assert all(codec.decode(list(word)).lstrip() in ("fox", "naïve café") for word in words)
        error = await refusal_of(server, TEXT, text_body(bad_words=["qxz" * 30]))
        assert error["message"] == "bad_words: an entry has more than 32 tokens"
        error = await refusal_of(server, TEXT, text_body(bad_words=["x"] * 129))
        assert error["param"] == "bad_words"

    with_server(server_settings(model_folder), test)


def test_ids_without_a_token_alone_are_not_allowed(model_folder: Path, codec: TextCodec) -> None:
    """The engine never draws them, and so could draw nothing."""
    (absent, *others) = (token for token in range(1024) if codec.token_name(token) is None)

    async def test(server: Running) -> None:
        error = await refusal_of(server, CHAT, chat_body(allowed_token_ids=[absent, others[0]]))
        assert "allowed_token_ids: the tokenizer has a token for none of these ids" in error["message"]
        # with its own end token the engine knows that nothing else is left, and lets min_tokens not ban it
        await answer_of(server, CHAT, chat_body(allowed_token_ids=[absent, 7], max_tokens=1, min_tokens=1))
        assert server.engine.submitted[-1].params.allowed_token_ids == (7,)

    with_server(server_settings(model_folder), test)


def test_bad_words_leave_an_allowed_token(model_folder: Path, codec: TextCodec) -> None:
    """The engine would draw any token where nothing is left."""
    x, y = (codec.encode(letter, add_special_tokens=False)[0] for letter in "xy")

    async def test(server: Running) -> None:
        error = await refusal_of(server, TEXT, text_body(allowed_token_ids=[x], bad_words=["x"]))
        assert (error["param"], "every token of allowed_token_ids" in error["message"]) == ("bad_words", True)
        await answer_of(server, TEXT, text_body(allowed_token_ids=[x, y], bad_words=["x"], max_tokens=1))
        assert server.engine.submitted[-1].params.allowed_token_ids == (y,)

    with_server(server_settings(model_folder), test)


def test_text_of_a_tokenizer_that_is_larger_than_the_model_is_refused_by_id(
    model_folder: Path, codec: TextCodec
) -> None:
    tokens = codec.encode("hello world", add_special_tokens=False)
    model = Script(vocab_size=max(tokens))

    async def test(server: Running) -> None:
        error = await refusal_of(server, TEXT, text_body("hello world"))
        largest = max(tokens)
        assert f"token id {largest} is out of vocabulary: the model has {largest} tokens" in error["message"]

    with_server(server_settings(model_folder), test, model)


def test_allowed_tokens_reach_the_engine(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        await answer_of(server, CHAT, chat_body(allowed_token_ids=[7, 9], max_tokens=1))
        assert server.engine.submitted[0].params.allowed_token_ids == (7, 9)
        error = await refusal_of(server, CHAT, chat_body(allowed_token_ids=[1024]))
        assert error["message"] == (
            "allowed_token_ids: token id 1024 is out of vocabulary: the model has 1024 tokens, 0 to 1023"
        )
        await refusal_of(server, CHAT, chat_body(allowed_token_ids=[]))

    with_server(server_settings(model_folder), test)


def test_errors_of_logit_bias_name_every_key_and_id_and_the_vocabulary(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        error = await refusal_of(server, TEXT, text_body(logit_bias={"the\n": 1, "5": 2, "x": 1}))
        assert error["message"] == 'logit_bias: keys must be token ids, such as 50256, not "the?", "x"'
        error = await refusal_of(server, TEXT, text_body(logit_bias={"5": 101.5, "6": 1, "7": -200}))
        assert error["message"] == (
            "logit_bias: values must be between -100 and 100: token 5 has 101.5, token 7 has -200"
        )
        error = await refusal_of(server, TEXT, text_body(logit_bias={"5000": 1}))
        assert "token id 5000 is out of vocabulary: the model has 1024 tokens" in error["message"]
        error = await refusal_of(server, TEXT, text_body(logit_bias={"5000": 1, "5": 1, "6000": 1}))
        assert "token ids 5000, 6000 are out of vocabulary: the model has 1024 tokens" in error["message"]
        error = await refusal_of(server, TEXT, text_body(allowed_token_ids=list(range(1000, 2000))))
        assert "1322, 1323 and 676 more are out of vocabulary" in error["message"]

    with_server(server_settings(model_folder), test)


def test_top_p_zero_is_greedy(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        await answer_of(server, TEXT, text_body(top_p=0, temperature=0.7, max_tokens=1))
        assert (server.engine.submitted[0].params.temperature, server.engine.submitted[0].params.top_p) == (0, 1)

    with_server(server_settings(model_folder), test)


def test_a_prompt_has_up_to_128_choices(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        answer = await answer_of(server, TEXT, text_body(n=128, max_tokens=1))
        assert len(answer["choices"]) == 128
        await refusal_of(server, TEXT, text_body(n=129))

    with_server(server_settings(model_folder), test, Script(max_running=128))


@pytest.mark.parametrize(
    ("tier", "band", "served"), [("auto", 0, "default"), ("priority", 0, "default"), ("flex", 1, "flex")]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_service_tier_is_never_above_the_tenants_band(
    model_folder: Path, tier: str, band: int, served: str, stream: bool
) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(CHAT, json=chat_body(service_tier=tier, max_tokens=1, stream=stream))
        parts = events_of(answer.text) if stream else [answer.json()]
        assert {part["service_tier"] for part in parts} == {served}
        assert server.engine.submitted[0].band == band

    with_server(server_settings(model_folder), test)


def test_unknown_fields_are_named_in_a_header(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        body = chat_body(max_tokens=1, temprature=0.5, **{"Bad\r\nName": 1, "tool_choice": "none", "x" * 99: None})
        answer = await server.http.post(CHAT, json=body)
        assert answer.headers["x-tiercel-ignored-fields"] == "temprature, Bad??Name"
        answer = await server.http.post(CHAT, json=chat_body(max_tokens=1, **{f"field{i}": i for i in range(99)}))
        assert len(answer.headers["x-tiercel-ignored-fields"].split(", ")) == 16
        answer = await server.http.post(CHAT, json=chat_body(max_tokens=1, user="me", metadata={"a": "b"}, store=True))
        assert "x-tiercel-ignored-fields" not in answer.headers

    with_server(server_settings(model_folder), test)


def test_metadata_is_checked(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for wrong in ({"a": 1}, {"k" * 65: "v"}, {"k": "v" * 513}, {str(i): "v" for i in range(17)}):
            error = await refusal_of(server, CHAT, chat_body(metadata=wrong))
            assert error["param"] == "metadata"

    with_server(server_settings(model_folder), test)


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_events_have_usage_null_until_the_last_one(model_folder: Path, path: str) -> None:
    async def test(server: Running) -> None:
        make = text_body if path == TEXT else chat_body
        body = make(stream=True, max_tokens=6, stream_options={"include_usage": True})
        *others, last = events_of((await server.http.post(path, json=body)).text)
        assert all(event["usage"] is None for event in others)
        assert last["usage"]["completion_tokens"] == 6
        assert last["system_fingerprint"] == "fp_0123456789abcdef"

    with_server(server_settings(model_folder), test, Script(step_s=0.005))


def test_forced_usage_is_on_every_event(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        events = events_of((await server.http.post(CHAT, json=chat_body(stream=True, max_tokens=4))).text)
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (0, 4)

    with_server(server_settings(model_folder), test, Script(step_s=0.005), enable_force_include_usage=True)


def test_every_answer_has_a_fingerprint_and_a_request_id(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for path, body in ((TEXT, text_body(max_tokens=1)), (CHAT, chat_body(max_tokens=1))):
            answer = await server.http.post(path, json=body)
            assert answer.json()["system_fingerprint"] == "fp_0123456789abcdef"
            assert len(answer.headers["x-request-id"]) == 32

    with_server(server_settings(model_folder), test)


def test_a_suffix_needs_the_tokens_of_fill_in_the_middle(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        error = await refusal_of(server, TEXT, text_body(suffix="end"))
        assert (error["code"], error["param"]) == ("unsupported_parameter", "suffix")
        await answer_of(server, TEXT, text_body(suffix="", max_tokens=1))

    with_server(server_settings(model_folder), test)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_the_order_that_a_request_asks_for_is_named_where_it_has_no_effect(model_folder: Path, policy: str) -> None:
    async def test(server: Running) -> None:
        message = {"max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]}
        cases = [
            (CHAT, chat_body(max_tokens=2, priority=3), "priority"),
            (TEXT, text_body(max_tokens=2, priority=0, odd=1), "odd, priority"),
            (CHAT, chat_body(max_tokens=2, service_tier="flex"), "service_tier"),
            ("/v1/messages", {**message, "priority": 1}, "priority"),
            ("/v1/responses", {"input": "hello", "max_output_tokens": 2, "service_tier": "flex"}, "service_tier"),
        ]
        for path, body, names in cases:
            answer = await server.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            expected = names if policy == "fcfs" else "odd" if "odd" in body else None
            assert answer.headers.get("x-tiercel-ignored-fields") == expected, body
        answer = await server.http.post(CHAT, json=chat_body(max_tokens=2, service_tier="default"))
        assert "x-tiercel-ignored-fields" not in answer.headers

    with_server(server_settings(model_folder), test, scheduling_policy=policy)
