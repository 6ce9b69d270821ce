"""The memory of whole answers with log-probabilities: small, estimated before any work, and limited."""

import asyncio
import json
import re
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.server.fake_engine import Script
from tests.server.harness import Running, chat_body, server_settings, text_body, until, with_server
from tests.server.test_launch import started
from tiercel.server.api.answer_budget import ANSWERS, answer_bytes
from tiercel.values.request import SamplingParams
from tiercel.values.units import KIB, MIB

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SMALL = {"max_answer_bytes": MIB}  # 4,937 tokens with 20 log-probabilities


def test_an_answer_that_is_too_large_alone_is_refused_with_its_fields_and_the_limit(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for route, body, param in (
            (TEXT, text_body(["a"] * 8, n=8, max_tokens=100, logprobs=20), "logprobs"),
            (CHAT, chat_body(n=8, max_tokens=1000, logprobs=True, top_logprobs=20), "logprobs"),
            (CHAT, chat_body(n=8, max_completion_tokens=9000), "max_completion_tokens"),
        ):
            answer = await server.http.post(route, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, "answer_too_large", param)
            assert f"{MIB} bytes (--max-answer-bytes)" in error["message"]
            for field in (param, "n", "stream"):
                assert field in error["message"]
        assert server.engine.submitted == []
        for body in (
            text_body(["a"] * 8, n=8, max_tokens=100, logprobs=20, stream=True),
            text_body(["a"] * 4, n=8, max_tokens=100, logprobs=20),
        ):
            assert (await server.http.post(TEXT, json=body)).status_code == 200
        assert server.context.answers.held_bytes == 0

    with_server(server_settings(model_folder), test, Script(max_model_len=10_000, blocks_total=1000), **SMALL)


def test_answers_under_way_have_a_limit_together_and_give_their_memory_back(model_folder: Path) -> None:
    body = text_body(["a"] * 4, n=8, max_tokens=150, logprobs=20)  # nearly the limit

    async def test(server: Running) -> None:
        answers = server.context.answers
        asking = [asyncio.create_task(server.http.post(TEXT, json=body)) for _ in range(ANSWERS)]
        await until(lambda: len(server.engine.submitted) == ANSWERS * 32)
        assert answers.held_bytes <= ANSWERS * MIB
        refused = await server.http.post(TEXT, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await server.http.post(TEXT, json=text_body(max_tokens=1))).status_code == 200
        asking.pop().cancel()
        await until(lambda: answers.held_bytes < (ANSWERS - 1) * MIB)
        for one in asking:
            assert (await one).status_code == 200
        await until(lambda: answers.held_bytes == 0)
        page = (await server.http.get("/metrics")).text
        assert 'reason="answer_memory"} 1.0\n' in page

    with_server(server_settings(model_folder), test, Script(step_s=0.01, max_running=500), **SMALL)


def test_the_estimate_is_the_product_of_tokens_choices_and_log_probabilities() -> None:
    plain, rich = SamplingParams(max_tokens=100), SamplingParams(max_tokens=100, logprobs=20)
    assert answer_bytes([rich], 8) == 8 * answer_bytes([rich], 1) == answer_bytes([rich] * 8, 1)
    assert answer_bytes([plain], 1) < answer_bytes([rich], 1) / 10
    assert answer_bytes([SamplingParams(max_tokens=131_072, logprobs=20)] * 64, 8) > 10**10


async def _raw_answer(server: Running, route: str, body: dict[str, object], version: str) -> object:
    """Return the choices of an answer to a client of another version of HTTP."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    text = json.dumps(body)
    start = f"POST {route} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{start}Content-Length: {len(text)}\r\n\r\n{text}".encode())
    answer = await reader.read()
    writer.close()
    head, _, content = answer.partition(b"\r\n\r\n")
    assert b"content-length: %d\r\n" % len(content) in head
    return json.loads(content)["choices"]


@pytest.mark.slow
def test_a_long_text_is_sent_in_pieces_with_its_length(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post(TEXT, json=text_body([5, 6], max_tokens=90_000))
        assert len(answer.content) > 64 * KIB
        assert int(answer.headers["content-length"]) == len(answer.content)

    with_server(server_settings(model_folder), test, Script(max_model_len=100_000, blocks_total=100_000))


@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_a_whole_answer_has_the_log_probabilities_of_the_stream(model_folder: Path, route: str) -> None:
    chat, text = chat_body(logprobs=True, top_logprobs=3), text_body(["a b", "c"], n=2, logprobs=3)
    body = {**(chat if route == CHAT else text), "max_tokens": 200, "seed": 5}

    async def test(server: Running) -> None:
        whole = await server.http.post(route, json=body)
        choices = whole.json()["choices"]
        assert await _raw_answer(server, route, body, "1.0") == choices
        streamed: dict[int, list[dict[str, object]]] = {}
        async with server.http.stream("POST", route, json={**body, "stream": True}) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        if choice["logprobs"]:
                            streamed.setdefault(choice["index"], []).append(choice["logprobs"])
        for choice in choices:
            parts = streamed[choice["index"]]
            for name in choice["logprobs"]:
                if name != "refusal":
                    assert choice["logprobs"][name] == [entry for part in parts for entry in part[name]]  # type: ignore[attr-defined]
        assert msgspec.json.decode(whole.content)["choices"][0]["logprobs"]

    with_server(server_settings(model_folder), test, Script())


@pytest.mark.slow
def test_a_token_with_log_probabilities_costs_a_few_hundred_bytes(model_folder: Path) -> None:
    body = text_body(["a b c d"] * 8, n=8, max_tokens=150, logprobs=20, ignore_eos=True)
    with started(model_folder, {}) as server:
        server.await_url()
        status = Path(f"/proc/{server.process.pid}/status")

        def peak_bytes() -> int:
            found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
            assert found is not None
            return int(found[1]) * KIB

        small = {**body, "prompt": ["a b c d"] * 64, "n": 8, "max_tokens": 1}
        assert httpx.post(f"{server.url}{TEXT}", json=small, timeout=60).status_code == 200  # the sequences themselves
        before = peak_bytes()
        answer = httpx.post(f"{server.url}{TEXT}", json=body, timeout=60)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 64 * 150
        assert (peak_bytes() - before) / (64 * 150) < 1000  # 4,500 with an object for each alternative


def test_an_answer_with_parts_counts_for_more() -> None:
    params = [SamplingParams(max_tokens=100)]
    assert answer_bytes(params, 2, is_parsed=True) > 2 * answer_bytes(params, 2)
