"""Requests that wait for too long: refused as by an overloaded server, unless the engine has begun with them."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.server.api.test_deadlines import ENDLESS, STUCK, TEXT, metric, with_held_clock
from tests.server.fake_engine import Script
from tests.server.harness import Running, running, server_settings, text_body, until
from tiercel.values.clock import ManualClock
from tiercel.values.outcome import FinishReason

LIMIT_S = 0.02
SERIES = 'tiercel_timeouts_total{limit="queue_timeout",stage="waiting"}'
TENANTS = "secret: s\ntenants: [{name: patient, key: one, queue_timeout_s: 0.5}, {name: usual, key: two}]\n"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_waits_for_too_long_is_503_and_others_go_on(model_folder: Path, stream: bool) -> None:
    async def test(server: Running, clock: ManualClock) -> None:
        other = asyncio.create_task(server.http.post(TEXT, json=text_body(max_tokens=100)))
        await until(lambda: len(server.engine.running) == 1)
        asking = asyncio.create_task(server.http.post(TEXT, json=text_body(["a", "b"], stream=stream)))
        await until(lambda: len(server.engine.waiting) == 2)
        clock.advance(1)
        answer = await asking
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "queue_timeout"
        assert int(answer.headers["retry-after"]) > 0
        assert "x-should-retry" not in answer.headers
        assert (await other).json()["choices"][0]["finish_reason"] == "length"
        assert await metric(server, SERIES) == 1
        assert [reason for _, reason in server.engine.aborted] == [FinishReason.TIMEOUT] * 2

    with_held_clock(model_folder, test, Script(step_s=0.02, max_running=1), queue_timeout_s=LIMIT_S)


def test_a_request_of_which_the_engine_has_begun_a_part_goes_on(model_folder: Path) -> None:
    """The second of two prompts waits. The engine is asked, and ends neither."""

    async def test(server: Running, clock: ManualClock) -> None:
        asking = asyncio.create_task(server.http.post(TEXT, json=text_body(["a", "b"], max_tokens=4)))
        await until(lambda: len(server.engine.running) == len(server.engine.waiting) == 1)
        clock.advance(1)
        choices = (await asking).json()["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["length"] * 2
        assert server.engine.aborted == []
        assert await metric(server, SERIES) == 0

    with_held_clock(model_folder, test, Script(step_s=0.2, max_running=1), queue_timeout_s=LIMIT_S)


def test_the_time_in_which_the_model_loads_counts(model_folder: Path) -> None:
    async def test(server: Running, clock: ManualClock) -> None:
        asking = asyncio.create_task(server.http.post(TEXT, json=text_body()))
        await until(lambda: server.context.admission.num_reserved == 1)
        clock.advance(1)
        answer = await asking
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_timeout")
        assert await metric(server, SERIES) == 1

    with_held_clock(model_folder, test, Script(load_s=60), wait=False, queue_timeout_s=LIMIT_S)


def test_a_limit_in_the_queue_after_comments_is_an_error_event(model_folder: Path) -> None:
    async def test(server: Running, clock: ManualClock) -> None:
        async with server.http.stream("POST", TEXT, json=text_body(stream=True)) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == ": keep-alive"
            clock.advance(1)
            rest = [line async for line in lines if line.startswith("data: ")]
        assert '"code":"queue_timeout"' in rest[0]
        assert rest[1:] == ["data: [DONE]"]

    with_held_clock(
        model_folder, test, Script(step_s=60), queue_timeout_s=LIMIT_S, sse_keep_alive_interval_s=0.05
    )  # fmt: skip


def test_a_tenant_may_have_its_own_limit(model_folder: Path, tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(TENANTS)

    async def test(server: Running, clock: ManualClock) -> None:
        def ask(key: str) -> "asyncio.Task[int]":
            async def status() -> int:
                headers = {"authorization": f"Bearer {key}"}
                return (await server.http.post(TEXT, json=text_body(max_tokens=2), headers=headers)).status_code

            return asyncio.create_task(status())

        patient, usual = ask("one"), ask("two")
        await until(lambda: len(server.engine.waiting) == 2)
        clock.advance(0.1)
        assert await usual == 503
        assert len(server.engine.waiting) == 1
        clock.advance(1)
        assert await patient == 503

    with_held_clock(model_folder, test, Script(step_s=60), queue_timeout_s=LIMIT_S, tenants_config=str(tenants))


def test_a_deadline_and_a_limit_in_the_queue_at_once_give_one_answer(model_folder: Path) -> None:
    async def test(server: Running, clock: ManualClock) -> None:
        asking = asyncio.create_task(server.http.post(TEXT, json=text_body(timeout=LIMIT_S, max_tokens=ENDLESS)))
        await until(lambda: server.engine.live == 1)
        clock.advance(1)
        assert (await asking).status_code in (503, 504)

    with_held_clock(model_folder, test, STUCK, queue_timeout_s=LIMIT_S)


def test_the_limit_is_off_by_default(model_folder: Path) -> None:
    async def run() -> None:
        async with running(replace(server_settings(model_folder))) as server:
            assert (server.context.settings.queue_timeout_s, server.context.settings.request_timeout_s) == (0, 0)

    asyncio.run(run())
