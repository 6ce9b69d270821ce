"""Large bodies: legal ones pass, others are refused before they are decoded."""

import asyncio
import json
import time
from pathlib import Path

import pytest

from tests.server.fake_engine import Script
from tests.server.harness import MODEL, Running, chat_body, server_settings, text_body, with_server
from tiercel.server.api.schemas.chat import ChatFields
from tiercel.server.api.schemas.fields import read_fields
from tiercel.server.api.schemas.unsupported import refuse_unsupported_in_messages
from tiercel.server.http.body import parse_object
from tiercel.values.errors import AdmissionError
from tiercel.values.units import MIB

VALUES = 256 * 1024
JSON = {"content-type": "application/json"}
CROWDED = {
    "empty arrays": b'{"prompt":"a","max_tokens":1,"x":[' + b"[]," * 2_600_000 + b"[]]}",
    "text parts": b'{"messages":[{"role":"user","content":[' + b'{"type":"text","text":""},' * 290_000 + b"{}]}]}",
    "biases": b'{"logit_bias":{' + b",".join(b'"%d":1' % token for token in range(500_000)) + b"}}",
    "token ids": b'{"tokens":[' + b"1," * 4_000_000 + b"1]}",
    "messages": b'{"messages":[' + b"{}," * 2_000_000 + b"{}]}",
    "brackets that end nowhere": b"[" * 8_000_000,
    "structure behind a string": b'{"a":"\\\\","x":[' + b"[]," * 100_000 + b"[]]}",
}


@pytest.mark.parametrize("name", CROWDED)
def test_a_body_with_too_many_values_is_refused_before_decoding(name: str) -> None:
    started_s = time.thread_time()
    with pytest.raises(AdmissionError, match="The body is too complex") as refusal:
        parse_object(CROWDED[name], max_values=VALUES)
    assert (refusal.value.status, refusal.value.code) == (400, "body_too_complex")
    assert time.thread_time() - started_s < 0.5  # decoding takes seconds


@pytest.mark.parametrize(
    "text",
    ['[{"x": 1}, ' * 90_000, "\\" * MIB, '"' * MIB, '\\",[' * 200_000, "naïve 🙂 " * 100_000],
    ids=["code", "backslashes", "quotes", "both", "letters"],
)
def test_a_long_text_may_contain_any_characters(text: str) -> None:
    body = json.dumps({"prompt": text}).encode()
    assert parse_object(body, max_values=VALUES) == {"prompt": text}


def test_the_limit_of_values_is_exact() -> None:
    assert len(str(parse_object(b'{"prompt":[' + b"1," * 99 + b"1]}", max_values=100))) > 100
    with pytest.raises(AdmissionError):
        parse_object(b'{"prompt":[' + b"1," * 100 + b"1]}", max_values=100)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"messages": [{"role": "user", "content": "x"}] * 2049}, "messages"),
        ({"messages": [{}] * 16_000}, "messages"),
        ({"logit_bias": {str(token): "x" for token in range(10_000)}}, "logit_bias"),
        ({"stop": ["x"] * 10_000}, "stop"),
        ({"stop_token_ids": ["x"] * 200_000}, "stop_token_ids"),
        ({"messages": [{"role": "user", "content": [{"type": "x"}] * 8193}]}, "messages"),
    ],
)
def test_lengths_are_checked_before_entries(fields: dict[str, object], name: str) -> None:
    body: dict[str, object] = {"messages": [{"role": "user", "content": "x"}], **fields}
    refuse_unsupported_in_messages(body)
    with pytest.raises(AdmissionError, match="expected at most") as refusal:
        read_fields(ChatFields, body)
    assert refusal.value.param == name
    assert ";" not in refusal.value.message


def test_the_longest_legal_prompts_are_served(model_folder: Path) -> None:
    context = 300_000

    async def test(server: Running) -> None:
        ids = await server.http.post("/v1/completions", json=text_body([5] * (context - 1), max_tokens=1))
        assert ids.status_code == 200
        body = json.dumps(chat_body("hello " * (MIB // 6), max_tokens=1)).encode()
        assert len(body) > MIB
        text = await server.http.post("/v1/chat/completions", content=body, headers=JSON)
        assert text.status_code == 200
        assert text.json()["usage"]["prompt_tokens"] > MIB // 6

    with_server(server_settings(model_folder), test, Script(max_model_len=context, blocks_total=100_000))


def test_the_event_loop_runs_on_while_a_large_body_is_refused(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        slowest_s = 0.0

        async def watch() -> None:
            nonlocal slowest_s
            while True:
                asked_s = time.thread_time()
                await asyncio.sleep(0.001)
                slowest_s = max(slowest_s, time.thread_time() - asked_s)

        watching = asyncio.create_task(watch())
        for route, name in (
            ("/v1/completions", "empty arrays"),
            ("/v1/chat/completions", "text parts"),
            ("/v1/chat/completions", "messages"),
            ("/v1/chat/completions", "biases"),
            ("/detokenize", "token ids"),
        ):
            answer = await server.http.post(route, content=CROWDED[name], headers=JSON)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "body_too_complex")
        watching.cancel()
        assert slowest_s < 0.5

    with_server(server_settings(model_folder), test)


def test_detokenize_takes_as_many_tokens_as_a_body_may_have(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        fits = await server.http.post("/detokenize", json={"model": MODEL, "tokens": [5] * 257})
        assert fits.status_code == 200  # more than the context
        answer = await server.http.post("/detokenize", json={"model": MODEL, "tokens": [5] * 262_144})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "body_too_complex")

    with_server(server_settings(model_folder), test)
