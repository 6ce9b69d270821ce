"""Answers that repeat the prompt or say more about tokens: echo, prompt_logprobs, token ids, best_of."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.server.fake_engine import FakeEngine, Script
from tests.server.harness import Running, chat_body, server_settings, text_body, until, with_server
from tiercel.server.text.tokenizer import TextCodec
from tiercel.settings.settings import EngineSettings

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = [30, 31, 32, 33, 34]


def events_of(body: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def answer_of(server: Running, path: str, body: dict[str, object]) -> dict[str, Any]:
    answer = await server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refusal_of(server: Running, path: str, body: dict[str, object]) -> dict[str, Any]:
    answer = await server.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_echo_repeats_the_prompt_with_its_log_probabilities(
    model_folder: Path, codec: TextCodec, max_tokens: int, stream: bool
) -> None:
    reply = codec.encode("Hello world", add_special_tokens=False)

    async def test(server: Running) -> None:
        body = text_body(PROMPT, echo=True, logprobs=2, max_tokens=max_tokens, stream=stream)
        answer = await server.http.post(TEXT, json=body)
        parts = events_of(answer.text) if stream else [answer.json()]
        choices = [part["choices"][0] for part in parts]
        said = reply[:max_tokens]
        assert "".join(choice["text"] for choice in choices) == codec.decode(PROMPT) + codec.decode(said)
        assert choices[-1]["finish_reason"] == "length"
        columns = {
            name: [entry for choice in choices for entry in choice["logprobs"][name]]
            for name in ("text_offset", "token_logprobs", "tokens", "top_logprobs")
        }
        pieces = [codec.vocabulary.token_bytes(token).decode("utf-8", "replace") for token in (*PROMPT, *said)]
        assert columns["tokens"] == pieces
        assert columns["token_logprobs"] == [None, *[-0.25] * 4, *[-0.5] * max_tokens]
        assert columns["text_offset"] == [len("".join(pieces[:index])) for index in range(len(pieces))]
        assert columns["top_logprobs"][0] is None
        assert all(entry[piece] <= 0 for entry, piece in zip(columns["top_logprobs"][1:], pieces[1:], strict=True))
        assert [next(iter(entry)) for entry in columns["top_logprobs"][1:]] == pieces[1:]  # the drawn one is the first
        if not stream:
            assert parts[0]["usage"]["completion_tokens"] == max_tokens
        (request,) = server.engine.submitted
        assert (request.params.prompt_logprobs, request.params.max_tokens) == (2, max_tokens)

    with_server(server_settings(model_folder), test, Script(reply=tuple(reply)))


def test_echo_of_a_text_repeats_the_text(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        answer = await answer_of(server, TEXT, text_body("hello world", echo=True, max_tokens=0))
        assert answer["choices"][0]["text"] == "hello world"
        assert answer["choices"][0]["logprobs"] is None
        assert answer["usage"]["completion_tokens"] == 0

    with_server(server_settings(model_folder), test)


def test_the_requests_of_a_harness_are_answered_in_the_shape_that_it_reads(model_folder: Path) -> None:
    """lm-evaluation-harness, model local-completions: several prompts of tokens, echo, and one token after them."""

    async def test(server: Running) -> None:
        prompts = [PROMPT, PROMPT[:3]]
        body = text_body(prompts, temperature=0, max_tokens=1, logprobs=1, echo=True, seed=1234)
        answer = await answer_of(server, TEXT, body)
        for prompt, choice in zip(prompts, sorted(answer["choices"], key=lambda one: one["index"]), strict=True):
            context = 1
            logprobs = choice["logprobs"]
            assert sum(logprobs["token_logprobs"][context:-1]) == -0.25 * (len(prompt) - context)
            for token, tops in zip(logprobs["tokens"][context:-1], logprobs["top_logprobs"][context:-1], strict=True):
                assert token != max(tops, key=lambda piece: tops[piece])

    with_server(server_settings(model_folder), test)


@pytest.mark.parametrize("count", [0, 2])
def test_prompt_logprobs_have_the_shape_of_vllm(model_folder: Path, count: int) -> None:
    async def test(server: Running) -> None:
        body = text_body([PROMPT, [40]], prompt_logprobs=count, max_tokens=1, n=2)
        choices = (await answer_of(server, TEXT, body))["choices"]
        assert len(choices) == 4
        for choice in choices[:2]:
            first, *others = choice["prompt_logprobs"]
            assert first is None
            for token, entries in zip(PROMPT[1:], others, strict=True):
                assert next(iter(entries)) == str(token)
                assert entries[str(token)]["logprob"] == -0.25
                assert entries[str(token)]["rank"] == 2
                assert set(entries[str(token)]) == {"logprob", "rank", "decoded_token"}
                assert sorted(one["rank"] for key, one in entries.items() if key != str(token)) == [1, 2][:count]
        assert [choice["prompt_logprobs"] for choice in choices[2:]] == [[None], [None]]
        asked = [request.params.prompt_logprobs for request in server.engine.submitted]
        assert asked == [count, None, count, None]  # computed once for each prompt

        chat = await answer_of(server, CHAT, chat_body(prompt_logprobs=count, max_tokens=1, n=2))
        assert chat["prompt_logprobs"][0] is None
        assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]

    with_server(server_settings(model_folder), test)


def test_a_prompt_whose_engine_died_is_not_sent_from_the_start(model_folder: Path) -> None:
    """The next engine gets the number of positions that are known."""

    async def test(server: Running) -> None:
        client = server.context.client
        client.on_lost = lambda: None
        body = text_body(PROMPT, prompt_logprobs=1, max_tokens=4)
        asking = asyncio.create_task(server.http.post(TEXT, json=body))
        await until(lambda: client.sequences.num_started == 1)
        server.engine.die()
        following = await _next_engine(server)
        choice = (await asking).json()["choices"][0]
        assert len(choice["prompt_logprobs"]) == len(PROMPT)
        (resumed,) = following.submitted
        assert resumed.num_read == len(PROMPT) - 1

    with_server(server_settings(model_folder), test, Script(step_s=0.05))


async def _next_engine(server: Running) -> FakeEngine:
    ours, theirs = socket.socketpair()
    following = FakeEngine(Script())
    await following.open(theirs)
    await server.context.client.open(ours, EngineSettings(model=server.context.settings.model))
    return following


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_returned(model_folder: Path, codec: TextCodec, stream: bool) -> None:
    reply = codec.encode("Hello world, hello", add_special_tokens=False)

    async def test(server: Running) -> None:
        body = text_body(PROMPT, return_token_ids=True, max_tokens=4, stream=stream)
        answer = await server.http.post(TEXT, json=body)
        parts = events_of(answer.text) if stream else [answer.json()]
        choices = [part["choices"][0] for part in parts]
        assert [token for choice in choices for token in choice["token_ids"]] == reply[:4]
        assert choices[0]["prompt_token_ids"] == PROMPT
        assert all("prompt_token_ids" not in choice for choice in choices[1:])

        answer = await server.http.post(CHAT, json=chat_body(return_token_ids=True, max_tokens=4, stream=stream))
        parts = events_of(answer.text) if stream else [answer.json()]
        said = [token for part in parts for token in part["choices"][0].get("token_ids", ())]
        assert said == reply[:4]
        assert len(parts[0]["prompt_token_ids"]) == len(server.engine.submitted[-1].prompt) // 4

    with_server(server_settings(model_folder), test, Script(reply=tuple(reply)))


def test_a_hidden_stop_token_is_among_the_token_ids(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        body = text_body(PROMPT, return_token_ids=True, stop_token_ids=[52])
        choice = (await answer_of(server, TEXT, body))["choices"][0]
        assert (choice["token_ids"], choice["stop_reason"]) == ([50, 51, 52], 52)

    with_server(server_settings(model_folder), test, Script(reply=(50, 51, 52)))


@pytest.mark.parametrize("stream", [False, True])
def test_ids_and_log_probabilities_are_equally_many(model_folder: Path, stream: bool) -> None:
    async def test(server: Running) -> None:
        more: dict[str, object] = {"stream": stream, "stop_token_ids": [52]}
        for returned in (True, False):
            body = text_body([9], logprobs=1, return_token_ids=returned, **more)
            answer = await server.http.post(TEXT, json=body)
            choices = [part["choices"][0] for part in (events_of(answer.text) if stream else [answer.json()])]
            columns = [choice["logprobs"]["tokens"] for choice in choices]
            assert sum(map(len, columns)) == 2 + returned
            if returned:
                assert [len(column) for column in columns] == [len(choice["token_ids"]) for choice in choices]
            body = chat_body(logprobs=True, return_token_ids=returned, **more)
            answer = await server.http.post(CHAT, json=body)
            choices = [part["choices"][0] for part in (events_of(answer.text) if stream else [answer.json()])]
            counts = [len((choice.get("logprobs") or {"content": ()})["content"]) for choice in choices]
            assert sum(counts) == 2 + returned
            if returned:
                assert counts == [len(choice.get("token_ids") or ()) for choice in choices]

    with_server(server_settings(model_folder), test, Script(reply=(50, 51, 52)))


def test_an_echo_of_tokens_without_its_special_tokens_has_offsets_of_what_it_shows(
    model_folder: Path, codec: TextCodec
) -> None:
    end = codec.vocabulary.special_id_by_text["</s>"]

    async def test(server: Running) -> None:
        for skips in (True, False):
            body = text_body([end, 50, end], echo=True, logprobs=1, max_tokens=2, skip_special_tokens=skips)
            choice = (await answer_of(server, TEXT, body))["choices"][0]
            pieces = [codec.decode([token], skip_special_tokens=skips) for token in (end, 50, end, 51, 53)]
            assert choice["text"] == "".join(pieces)
            places = [len("".join(pieces[:index])) for index in range(len(pieces))]
            assert choice["logprobs"]["text_offset"] == places

    with_server(server_settings(model_folder), test, Script(reply=(51, 53)))


def test_tokens_of_log_probabilities_are_written_as_ids(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        more: dict[str, object] = {"return_tokens_as_token_ids": True, "max_tokens": 1}
        logprobs = (await answer_of(server, TEXT, text_body([9], logprobs=2, **more)))["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["token_id:50"]
        assert list(logprobs["top_logprobs"][0]) == ["token_id:50", "token_id:51"]
        body = chat_body(logprobs=True, top_logprobs=1, **more)
        (entry,) = (await answer_of(server, CHAT, body))["choices"][0]["logprobs"]["content"]
        assert (entry["token"], entry["top_logprobs"][0]["token"]) == ("token_id:50", "token_id:50")

    with_server(server_settings(model_folder), test, Script(reply=(50,)))


def test_the_operator_has_all_tokens_of_log_probabilities_written_as_ids(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        body = text_body([9], logprobs=1, max_tokens=1)
        assert (await answer_of(server, TEXT, body))["choices"][0]["logprobs"]["tokens"] == ["token_id:50"]

    with_server(server_settings(model_folder), test, Script(reply=(50,)), return_tokens_as_token_ids=True)


def test_minus_one_asks_for_the_whole_vocabulary(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        await answer_of(server, TEXT, text_body([9], logprobs=-1, prompt_logprobs=-1, max_tokens=1))
        await answer_of(server, CHAT, chat_body(logprobs=True, top_logprobs=-1, max_tokens=1))
        asked = [(one.params.logprobs, one.params.prompt_logprobs) for one in server.engine.submitted]
        assert asked == [(1024, 1024), (1024, None)]

    with_server(server_settings(model_folder), test, Script(reply=(1,)), max_logprobs=-1)


def test_the_limit_of_log_probabilities_holds_for_all_fields(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for body in ({"logprobs": 21}, {"logprobs": -1}, {"prompt_logprobs": 21}, {"prompt_logprobs": -1}):
            error = await refusal_of(server, TEXT, text_body(**body))
            assert "greater than max allowed: 20" in error["message"]
            assert error["param"] == next(iter(body))
        error = await refusal_of(server, TEXT, text_body(prompt_logprobs=1, stream=True))
        assert error["message"] == "`prompt_logprobs` are not available when `stream=True`."

    with_server(server_settings(model_folder), test)


def test_the_best_choices_have_the_highest_mean_log_probability(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        answer = await answer_of(server, TEXT, text_body([PROMPT, [60]], best_of=3, n=2, max_tokens=2))
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert all(choice["logprobs"] is None for choice in answer["choices"])
        assert answer["usage"]["completion_tokens"] == 12
        assert [request.params.logprobs for request in server.engine.submitted] == [0] * 6
        await refusal_of(server, TEXT, text_body(best_of=1, n=2))
        await refusal_of(server, TEXT, text_body(best_of=2, stream=True))
        await answer_of(server, TEXT, text_body(best_of=1, stream=False))

    with_server(server_settings(model_folder), test)


def test_log_probabilities_of_a_long_prompt_count_for_the_limit_of_answers(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        long = [5] * 200
        for more in ({"prompt_logprobs": 20}, {"echo": True, "logprobs": 20, "stream": True}):
            error = await refusal_of(server, TEXT, text_body(long, max_tokens=1, **more))
            assert (error["code"], error["param"]) == ("answer_too_large", "prompt_logprobs")
            assert "--max-answer-bytes" in error["message"]
        await answer_of(server, TEXT, text_body(long, max_tokens=1, prompt_logprobs=5))
        await until(lambda: server.context.answers.held_bytes == 0)

    with_server(server_settings(model_folder), test, max_answer_bytes=16 * 1024)


def test_no_tokens_are_a_whole_answer(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        answer = await answer_of(server, TEXT, text_body(PROMPT, max_tokens=0, logprobs=1))
        assert answer["choices"][0]["text"] == ""
        assert answer["choices"][0]["logprobs"]["tokens"] == []
        assert answer["choices"][0]["finish_reason"] == "length"
        await refusal_of(server, CHAT, chat_body(max_tokens=0))
        chat = await answer_of(server, CHAT, chat_body(max_tokens=0, prompt_logprobs=0))
        assert chat["choices"][0]["message"]["content"] == ""
        whole = [7] * 256  # the context
        await answer_of(server, TEXT, text_body(whole, max_tokens=0))
        await refusal_of(server, TEXT, text_body([*whole, 7], max_tokens=0))
        await refusal_of(server, TEXT, text_body(whole, max_tokens=1))

    with_server(server_settings(model_folder), test)
