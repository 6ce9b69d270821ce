"""The log line of a request and the `Server-Timing` header of its response."""

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog

from tests.server.fake_engine import FakeEngine, Script
from tests.server.harness import Running, chat_body, running, server_settings, text_body, until, with_server
from tiercel.server.text.tokenizer import TextCodec
from tiercel.settings.settings import EngineSettings
from tiercel.values.outcome import Absence

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
TRACE = "0af7651916cd43dd8448eb211c80319c"
CANARY = "xylocarp"


def _lines(
    model_folder: Path, test: Callable[[Running], Awaitable[None]], script: Script | None = None, **changes: object
) -> list[MutableMapping[str, Any]]:
    with structlog.testing.capture_logs() as logs:
        with_server(server_settings(model_folder), test, script, **changes)
    return [entry for entry in logs if entry["event"] == "request_done"]


def _timing(response: httpx.Response) -> dict[str, float]:
    """Return the milliseconds by stage of a `Server-Timing` header."""
    entries = [entry.split(";dur=") for entry in response.headers["server-timing"].split(", ")]
    assert all(re.fullmatch(r"[a-z]+", name) for name, _ in entries)
    return {name: float(duration) for name, duration in entries}


def test_the_line_of_a_finished_request_has_all_fields(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        await server.http.post(TEXT, json=text_body(n=2, max_tokens=4), headers={"x-request-id": "mine"})

    (line,) = _lines(model_folder, test, Script(cached=1, step_s=0.01))
    assert line["log_level"] == "info"
    assert line["request_id"] == "mine"
    assert (line["status"], line["route"], line["finish_reason"]) == (200, TEXT, "length")
    assert (line["tenant"], line["model"], line["sequences"]) == ("default", "tiny", 2)
    assert (line["prompt_tokens"], line["cached_tokens"], line["output_tokens"]) == (4, 2, 8)
    assert 0 < line["parse_ms"] < line["duration_ms"]
    assert 0 < line["tokenise_ms"] < line["duration_ms"]
    assert 0 <= line["queue_ms"] <= line["ttft_ms"] < line["duration_ms"]
    assert 5 < line["itl_p50_ms"] <= line["itl_p99_ms"] <= line["itl_max_ms"] <= line["decode_ms"] + 5
    assert 0 < line["detokenise_ms"] < line["duration_ms"]
    assert (line["preemptions"], line["swapped_tokens"], line["recomputed_tokens"]) == (0, 0, 0)
    assert line["swap_ms"] is None
    assert line["trace_id"] is None


def test_cached_tokens_are_logged_by_tier_and_absences_as_swap(model_folder: Path) -> None:
    absences = (Absence(1.0, 1.5, None), Absence(2.0, 2.25, "debt"), Absence(3.0, 3.5, "growth"))
    reported = {
        "num_cached_ddr": 3,
        "num_cached_ssd": 2,
        "preemptions": 2,
        "swapped_tokens": 48,
        "recomputed_tokens": 7,
    }

    async def test(server: Running) -> None:
        await server.http.post(TEXT, json=text_body(list(range(8, 20)), max_tokens=2))

    (line,) = _lines(model_folder, test, Script(cached=9, extra={**reported, "absences": absences}))
    assert [line[f"cached_{tier}tokens"] for tier in ("", "hbm_", "ddr_", "ssd_")] == [9, 4, 3, 2]
    assert (line["preemptions"], line["swapped_tokens"], line["recomputed_tokens"]) == (2, 48, 7)
    assert line["swap_ms"] == 750.0


def test_the_line_names_the_trace_of_the_caller(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        await server.http.post(TEXT, json=text_body(max_tokens=1), headers=headers)

    (line,) = _lines(model_folder, test)
    assert line["trace_id"] == TRACE


def test_a_stop_string_is_the_finish_reason_of_a_stream(model_folder: Path, codec: TextCodec) -> None:
    reply = tuple(codec.encode("one two three", add_special_tokens=False))

    async def test(server: Running) -> None:
        await server.http.post(TEXT, json=text_body(stream=True, max_tokens=50, stop="two"))

    (line,) = _lines(model_folder, test, Script(reply=reply, step_s=0.02))
    assert line["finish_reason"] == "stop"


def test_the_line_of_a_client_that_left_has_499_and_the_engines_final_report(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        asking = asyncio.create_task(server.http.post(TEXT, json=text_body(max_tokens=200)))
        await until(lambda: server.engine.steps > 1)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        await until(lambda: server.context.client.sequences.num_unfinished == 0)

    (line,) = _lines(model_folder, test, Script(step_s=0.05, cached=1, extra={"preemptions": 3}))
    assert (line["status"], line["finish_reason"]) == (499, "client_gone")
    assert line["output_tokens"] > 0
    assert (line["cached_tokens"], line["preemptions"]) == (1, 3)


def test_a_client_that_left_a_hung_engine_is_logged_at_shutdown(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        asking = asyncio.create_task(server.http.post(TEXT, json=text_body(max_tokens=200)))
        await until(lambda: server.engine.steps > 1)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        await until(lambda: server.context.client.sequences.num_open == 0)

    (line,) = _lines(model_folder, test, Script(step_s=0.02, hang_at_step=3, ignores_aborts=True))
    assert (line["status"], line["finish_reason"]) == (499, "client_gone")


def test_the_line_of_a_request_whose_time_ended_while_the_engine_was_restarted(model_folder: Path) -> None:
    """It has the outcome that /metrics counts, and is written when the next engine serves."""

    async def test(server: Running) -> None:
        client = server.context.client
        client.on_lost = lambda: None
        asking = asyncio.create_task(server.http.post(TEXT, json=text_body(timeout=1.5)))
        await until(lambda: server.engine.live == 1)
        server.engine.die()
        assert (await asking).status_code == 504
        ours, theirs = socket.socketpair()
        await FakeEngine(Script()).open(theirs)
        await client.open(ours, EngineSettings(model=server.context.settings.model))
        await until(lambda: client.sequences.num_unfinished == 0)
        ends = 'vllm:request_success_total{engine="0",finished_reason="timeout",model_name="tiny"} 1'
        assert ends in (await server.http.get("/metrics")).text.splitlines()

    (line,) = _lines(model_folder, test, Script(hang_at_step=0))
    assert (line["status"], line["finish_reason"], line["output_tokens"]) == (504, "timeout", 0)


@pytest.mark.parametrize("stream", [False, True])
def test_every_request_has_exactly_one_line(model_folder: Path, stream: bool) -> None:
    async def test(server: Running) -> None:
        key = {"authorization": "Bearer right"}
        assert (await server.http.post(CHAT, json=chat_body(stream=stream))).status_code == 401
        for body in (chat_body(tools=[]), chat_body(max_tokens=2, stream=stream), chat_body("a" * 4096)):
            await server.http.post(CHAT, json=body, headers=key)
        await server.http.post(TEXT, content=b"{", headers={**key, "content-type": "application/json"})
        await server.http.get("/version")

    lines = _lines(model_folder, test, Script(), api_keys=("right",), max_body_bytes=2048)
    assert [line["status"] for line in lines] == [401, 400, 200, 413, 400]
    assert [line["finish_reason"] for line in lines] == [None, None, "length", None, None]
    assert len({line["request_id"] for line in lines}) == 5
    assert [line["tenant"] for line in lines] == [None, "default", "default", None, "default"]


def test_lines_can_be_switched_off(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        await server.http.post(TEXT, json=text_body(max_tokens=1))

    assert _lines(model_folder, test, enable_log_requests=False) == []


def test_the_head_of_a_whole_answer_has_all_stages(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        timing = _timing(await server.http.post(CHAT, json=chat_body(max_tokens=4)))
        assert list(timing) == [
            *("parse", "tokenise", "queue", "prefill", "ttft", "decode", "detokenise", "total"),
        ]
        assert timing["ttft"] + timing["decode"] <= timing["total"] + 5
        assert timing["queue"] <= timing["ttft"]

    with_server(server_settings(model_folder), test, Script(step_s=0.01))


def test_the_head_of_a_stream_has_the_stages_up_to_the_first_token(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        timing = _timing(await server.http.post(CHAT, json=chat_body(max_tokens=4, stream=True)))
        assert list(timing) == ["parse", "tokenise", "queue", "prefill", "ttft", "detokenise", "total"]
        assert timing["ttft"] <= timing["total"]

    with_server(server_settings(model_folder), test, Script(step_s=0.01))


def test_the_head_of_a_refusal_has_the_stages_before_it(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        assert list(_timing(await server.http.post(CHAT, json=chat_body(tools=[])))) == ["total"]
        long = await server.http.post(CHAT, json=chat_body("word " * 400))
        assert long.status_code == 400
        assert list(_timing(long)) == ["parse", "tokenise", "total"]
        assert "server-timing" not in (await server.http.get("/version")).headers

    with_server(server_settings(model_folder), test)


def test_no_text_of_a_prompt_or_an_answer_is_ever_logged(
    model_folder: Path, codec: TextCodec, caplog: pytest.LogCaptureFixture
) -> None:
    """All loggers at DEBUG, for requests that succeed, fail, are refused and are cut off."""
    reply = codec.encode(f" {CANARY}", add_special_tokens=False)
    poison = reply[-1]
    answers: list[str] = []

    async def ask() -> None:
        async with running(server_settings(model_folder), Script(reply=tuple(reply), cached=1, step_s=0.005)) as server:
            for body in (
                chat_body(CANARY, max_tokens=len(reply)),
                chat_body(CANARY, max_tokens=len(reply), stream=True, logprobs=True, top_logprobs=1),
                chat_body(CANARY * 400),
                chat_body(CANARY, tools=[CANARY]),
                {"model": "tiny", "messages": [{"role": CANARY, "content": CANARY}]},
                {"model": "tiny", "messages": CANARY},
            ):
                answers.append((await server.http.post(CHAT, json=body)).text)
            await server.http.post(TEXT, json=text_body([CANARY, CANARY], stop=[CANARY], max_tokens=2))
            await server.http.post(TEXT, content=f'{{"{CANARY}'.encode(), headers={"content-type": "application/json"})
            asking = asyncio.create_task(server.http.post(TEXT, json=text_body(CANARY, max_tokens=200)))
            await until(lambda: server.context.client.sequences.num_unfinished > 0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await until(lambda: server.context.client.sequences.num_unfinished == 0)
        async with running(server_settings(model_folder), Script(fail_prompt_with=poison)) as server:
            answers.append((await server.http.post(CHAT, json=chat_body(f"{CANARY} {CANARY}"))).text)

    with caplog.at_level(logging.DEBUG), structlog.testing.capture_logs() as logs:
        asyncio.run(ask(), debug=True)
    assert any(CANARY in answer for answer in answers)
    assert sum(entry["event"] == "request_done" for entry in logs) == 10
    assert CANARY not in str(logs)
    records = [record for record in caplog.records if not record.name.startswith("httpcore")]  # of the test's client
    assert CANARY not in "\n".join(f"{record.getMessage()} {record.args} {record.exc_text}" for record in records)
