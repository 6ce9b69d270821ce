"""What fields stand for beyond their own bytes is counted and limited: the table "Expansion" of SECURITY.md."""

import shutil
import tracemalloc
from pathlib import Path

import pytest
from msgspec.structs import replace
from tokenizers import AddedToken, Tokenizer

from tests.server.builders import build_byte_level
from tests.server.fake_engine import Script
from tests.server.harness import Running, server_settings, text_body, until, with_server
from tiercel.server.api.answer_budget import prompt_bytes
from tiercel.server.api.expansion import check_submission, submitted_bytes
from tiercel.server.api.message_turns import chat_messages
from tiercel.server.api.schemas.messages import MessagePromptFields
from tiercel.server.text.tokenizer import LongTextError, TextCodec
from tiercel.values.errors import AdmissionError
from tiercel.values.request import SamplingParams
from tiercel.values.units import KIB, MIB

TEXT = "/v1/completions"


def test_what_the_engine_gets_is_counted_for_each_choice() -> None:
    plain, rich = SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, allowed_token_ids=tuple(range(8000)))
    assert submitted_bytes([1000], plain, 128) >= 128 * 4000
    assert submitted_bytes([1] * 64, rich, 16) > 64 * 16 * 8000
    check_submission([1000], plain, 4, MIB)
    with pytest.raises(AdmissionError) as refused:
        check_submission([1] * 64, rich, 16, MIB)
    assert (refused.value.status, refused.value.code, refused.value.param) == (413, "request_too_large", "n")
    assert str(MIB) in refused.value.message


def test_a_request_whose_choices_take_too_much_on_the_way_to_the_engine_is_refused(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        body = text_body([[5]] * 32, n=32, max_tokens=1, allowed_token_ids=list(range(200)))
        refused = await server.http.post(TEXT, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (413, "n")
        assert server.engine.submitted == []
        await until(lambda: server.context.bodies.held_bytes == 0)
        assert (await server.http.post(TEXT, json={**body, "n": 2})).status_code == 200

    with_server(replace(server_settings(model_folder), max_pending_body_bytes=100 * KIB), test)


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_that_an_answer_repeats_are_counted_for_each_choice(model_folder: Path, stream: bool) -> None:
    async def test(server: Running) -> None:
        prompts = [[5] * 1000] * 8
        for field in ("return_token_ids", "echo"):
            body = text_body(prompts, n=16, max_tokens=1, stream=stream, **{field: True})
            refused = await server.http.post(TEXT, json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "answer_too_large"), refused.text
            assert refused.json()["error"]["param"] == field
            assert "--max-answer-bytes" in refused.json()["error"]["message"]
            assert (await server.http.post(TEXT, json={**body, "n": 1})).status_code == 200
        await until(lambda: server.context.answers.held_bytes == 0)

    settings = replace(server_settings(model_folder), max_answer_bytes=256 * KIB)
    with_server(settings, test, Script(max_model_len=10_000, blocks_total=10_000))


def test_log_probabilities_of_a_prompt_count_as_objects_in_the_events_of_a_stream(model_folder: Path) -> None:
    params = [SamplingParams(max_tokens=1, prompt_logprobs=20)]
    assert prompt_bytes(params, [1000], in_events=True) > 20 * prompt_bytes(params, [1000])

    async def test(server: Running) -> None:
        body = text_body([5] * 1000, echo=True, logprobs=5, max_tokens=1)
        assert (await server.http.post(TEXT, json=body)).status_code == 200
        refused = await server.http.post(TEXT, json={**body, "stream": True})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "answer_too_large")
        assert "stream to false" in refused.json()["error"]["message"]

    settings = replace(server_settings(model_folder), max_answer_bytes=MIB)
    with_server(settings, test, Script(max_model_len=10_000, blocks_total=10_000))


def test_a_long_text_is_refused_after_as_many_tokens_as_it_may_have() -> None:
    codec = TextCodec(build_byte_level().to_str(), {}, None)
    text = "é0x " * 25_000
    whole = len(codec.encode(text, add_special_tokens=False))
    assert codec.encode(text, add_special_tokens=False, most_tokens=whole) == codec.encode(
        text, add_special_tokens=False
    )
    with pytest.raises(LongTextError) as refused:
        codec.encode(text, add_special_tokens=False, most_tokens=1000)
    assert 1000 < refused.value.at_least < whole / 2  # the rest was not read


def test_thoughts_of_many_blocks_are_joined_once() -> None:
    blocks = [{"type": "thinking", "thinking": "x" * 100, "signature": ""}] * 5000
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": "b"},
    ]
    fields = MessagePromptFields.model_validate({"model": "m", "messages": talk})
    tracemalloc.start()
    messages = chat_messages(fields)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert messages[1]["reasoning_content"] == "\n".join(["x" * 100] * 5000)
    assert peak < 2 * MIB


def test_the_text_of_tokens_has_the_limit_of_an_answer_and_counts_until_it_is_sent(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        codec = server.context.codec
        longest = max(range(codec.vocabulary.size), key=lambda token: len((codec.token_name(token) or "").encode()))
        width = len((codec.token_name(longest) or "").encode())
        refused = await server.http.post("/detokenize", json={"tokens": [longest] * (4 * MIB // width)})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens"), refused.text
        held = server.context.answers.reserve_bytes(4 * MIB - 10)
        full = await server.http.post("/detokenize", json={"tokens": [longest] * 10})
        assert (full.status_code, full.json()["error"]["code"]) == (503, "overloaded")
        named = await server.http.post("/tokenize", json={"prompt": "a b c", "return_token_strs": True})
        assert named.status_code == 503
        held.release()
        assert (await server.http.post("/detokenize", json={"tokens": [longest] * 10})).status_code == 200
        await until(lambda: server.context.answers.held_bytes == 0)

    settings = replace(server_settings(model_folder), max_answer_bytes=MIB)
    with_server(settings, test, Script(max_model_len=2_000_000, blocks_total=1_000_000))


def test_a_suffix_counts_for_each_prompt_and_is_encoded_once(model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))

    async def test(server: Running) -> None:
        body = text_body(["a"] * 8, suffix="x y " * 200, max_tokens=1)
        answer = await server.http.post(TEXT, json=body)
        assert answer.status_code == 200, answer.text
        assert len(server.engine.submitted) == 8
        refused = await server.http.post(TEXT, json={**body, "prompt": ["a"] * 16})
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")
        assert refused.json()["error"]["param"] == "suffix"

    settings = replace(server_settings(folder), max_body_bytes=10 * KIB)
    with_server(settings, test, Script(max_model_len=2000, blocks_total=2000, vocab_size=1_000_000))


def test_tokens_count_among_the_bodies_until_they_are_submitted(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        body = text_body("a b c d " * 250, max_tokens=1)
        bodies = server.context.bodies
        with bodies.hold("other") as other:
            other.grow(60 * KIB)
            full = await server.http.post(TEXT, json=body)
            assert (full.status_code, full.json()["error"]["code"]) == (503, "overloaded")
            assert server.engine.submitted == []
            small = await server.http.post(TEXT, json=text_body("a", max_tokens=1))
            assert small.status_code == 200
        await until(lambda: bodies.held_bytes == 0)
        assert (await server.http.post(TEXT, json=body)).status_code == 200

    settings = replace(server_settings(model_folder), max_pending_body_bytes=80 * KIB)
    with_server(settings, test, Script(max_model_len=3000, blocks_total=3000))
