"""One log line a request, at its end."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import structlog

from server.tokenizer import TextCodec
from tests.server.fake_engine import Script
from tests.server.harness import Running, chat_body, server_settings, text_body, until, with_server

TEXT = "/v1/completions"


def _lines(
    model_folder: Path, test: Callable[[Running], Awaitable[None]], script: Script | None = None, **changes: object
) -> list[MutableMapping[str, Any]]:
    with structlog.testing.capture_logs() as logs:
        with_server(server_settings(model_folder), test, script, **changes)
    return [entry for entry in logs if entry["event"] == "request_done"]


def test_a_finished_request_has_all_its_numbers(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        await server.http.post(TEXT, json=text_body(n=2, max_tokens=4), headers={"x-request-id": "mine"})

    (line,) = _lines(model_folder, test, Script(cached=1, step_s=0.01))
    assert line["request_id"] == "mine"
    assert (line["status"], line["route"], line["finish_reason"]) == (200, TEXT, "length")
    assert (line["prompt_tokens"], line["cached_tokens"], line["output_tokens"]) == (4, 2, 8)
    assert line["queue_ms"] == 1.0
    assert 0 < line["ttft_ms"] < line["duration_ms"]
    assert 5 < line["itl_p50_ms"] <= line["itl_p99_ms"]
    assert line["preemptions"] == 0


def test_a_stop_string_is_the_finish_reason_of_a_stream(model_folder: Path, codec: TextCodec) -> None:
    reply = tuple(codec.encode("one two three", add_special_tokens=False))

    async def test(server: Running) -> None:
        await server.http.post(TEXT, json=text_body(stream=True, max_tokens=50, stop="two"))

    (line,) = _lines(model_folder, test, Script(reply=reply, step_s=0.02))
    assert line["finish_reason"] == "stop"


def test_a_client_that_left_is_499(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        asking = asyncio.create_task(server.http.post(TEXT, json=text_body(max_tokens=200)))
        await until(lambda: server.engine.steps > 1)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        await until(lambda: server.service.client.num_unfinished == 0)

    (line,) = _lines(model_folder, test, Script(step_s=0.05))
    assert (line["status"], line["finish_reason"]) == (499, "client_gone")
    assert line["output_tokens"] > 0


def test_a_refused_request_has_a_line_too(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        await server.http.post("/v1/chat/completions", json=chat_body(tools=[]))
        await server.http.get("/version")

    (line,) = _lines(model_folder, test)
    assert (line["status"], line["finish_reason"], line["ttft_ms"]) == (400, None, None)


def test_lines_can_be_switched_off(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        await server.http.post(TEXT, json=text_body(max_tokens=1))

    assert _lines(model_folder, test, enable_log_requests=False) == []
