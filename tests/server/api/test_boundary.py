"""Errors at the boundary of the HTTP API."""

import asyncio
import dataclasses
import json
from pathlib import Path

import structlog
from starlette.types import Message, Receive, Scope, Send

from tests.server.harness import chat_body, running, server_settings
from tiercel.server.api.context import ServerContext
from tiercel.server.api.middleware import ErrorBoundary
from tiercel.server.http.watch import SlowReaderError
from tiercel.server.tracing.record import RequestRecord
from tiercel.values.clock import ManualClock

WORDS = "private words from a prompt, /secret/path"


def _broken(context: ServerContext) -> ServerContext:
    def draw_seed() -> int:
        raise RuntimeError(WORDS)

    return dataclasses.replace(context, draw_seed=draw_seed)


def test_an_unexpected_error_answers_with_an_id_and_no_details(model_folder: Path) -> None:
    async def test() -> None:
        async with running(server_settings(model_folder), changed=_broken) as server:
            with structlog.testing.capture_logs() as logs:
                answer = await server.http.post("/v1/chat/completions", json=chat_body("private words"))
            assert answer.status_code == 500
            error = answer.json()["error"]
            assert (error["code"], error["type"]) == ("internal_error", "server_error")
            entry = next(entry for entry in logs if entry["event"] == "internal_error")
            assert entry["error_id"] in error["message"]
            assert entry["kind"] == "RuntimeError"
            assert "private" not in str(logs)
            assert "secret" not in str(logs) + answer.text
            assert server.context.client.sequences.num_unfinished == 0
            assert server.context.admission.num_reserved == 0
            assert (await server.http.post("/v1/chat/completions", json=chat_body(seed=1))).status_code == 200
            counted = (await server.http.get("/metrics")).text
            assert 'handler="/v1/chat/completions",method="POST",status="5xx"} 1.0' in counted

    asyncio.run(test())


def test_a_client_that_reads_nothing_gets_an_error_if_no_byte_was_sent() -> None:
    sent: list[Message] = []

    async def overflows(scope: Scope, receive: Receive, send: Send) -> None:
        raise SlowReaderError

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    record = RequestRecord("id", ManualClock())
    scope: Scope = {"type": "http", "state": {"request_record": record}}
    asyncio.run(ErrorBoundary(overflows)(scope, receive, send))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    error = json.loads(sent[1]["body"])["error"]
    assert (sent[0]["status"], error["code"], set(error)) == (408, "slow_reader", {"message", "type", "param", "code"})
    assert record.outcome == "slow_reader"
    sent.clear()
    record.status = 200
    asyncio.run(ErrorBoundary(overflows)(scope, receive, send))
    assert sent == []
