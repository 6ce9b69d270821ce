"""Requests whose time is up: in preparation, in the queue and while tokens come. The tests advance the clock."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace as with_fields
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from msgspec.structs import replace

from tests.server.fake_engine import Script
from tests.server.harness import Running, chat_body, running, server_settings, text_body, until
from tiercel.values.clock import ManualClock
from tiercel.values.outcome import FinishReason

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ENDLESS = 200  # tokens
SOON = 0.02  # seconds of a clock that stands still until the test advances it
SLOW = Script(step_s=0.02)
ONE_ROW = Script(step_s=0.02, max_running=1)
STUCK = Script(hang_at_step=0)

Json = dict[str, Any]  # Any: a JSON document


def with_held_clock(
    model_folder: Path,
    test: Callable[[Running, ManualClock], Awaitable[None]],
    script: Script,
    *,
    wait: bool = True,
    **changes: object,
) -> None:
    """Run a test against a server on whose clock no time passes unless the test advances it."""

    async def run() -> None:
        clock = ManualClock(time.monotonic())
        settings = replace(server_settings(model_folder), **changes)
        async with running(
            settings, script, wait=wait, changed=lambda context: with_fields(context, clock=clock)
        ) as server:
            await test(server, clock)
            await until(lambda: has_nothing(server))

    asyncio.run(run())


def has_nothing(server: Running) -> bool:
    sequences = server.context.client.sequences
    return server.engine.live == 0 and sequences.num_unfinished == 0 and sequences.num_tokenless == 0


def events_of(body: str) -> list[Json]:
    pieces = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    assert pieces[-1] == "[DONE]"
    return [json.loads(piece) for piece in pieces[:-1]]


def assert_exceeded(answer: httpx.Response) -> None:
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert answer.headers["x-should-retry"] == "false"


async def metric(server: Running, series: str) -> float:
    lines = (await server.http.get("/metrics")).text.splitlines()
    (value,) = [line.rpartition(" ")[2] for line in lines if line.startswith(series + " ")]
    return float(value)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("route", "body"), [(CHAT, chat_body()), (TEXT, text_body())])
@pytest.mark.sampled(2)
def test_a_deadline_that_passes_in_the_queue_is_504_and_others_go_on(
    model_folder: Path, route: str, body: Json, stream: bool
) -> None:
    async def test(server: Running, clock: ManualClock) -> None:
        other = asyncio.create_task(server.http.post(TEXT, json=text_body(max_tokens=120)))
        await until(lambda: len(server.engine.running) == 1)
        asking = asyncio.create_task(server.http.post(route, json={**body, "stream": stream, "timeout": SOON}))
        await until(lambda: len(server.engine.waiting) == 1)
        clock.advance(1)
        assert_exceeded(await asking)
        assert len(server.engine.waiting) == 0
        assert len(server.engine.running) == 1
        assert (await other).json()["choices"][0]["finish_reason"] == "length"
        assert await metric(server, 'tiercel_timeouts_total{limit="timeout",stage="waiting"}') == 1
        ends = 'vllm:request_success_total{engine="0",finished_reason="timeout",model_name="tiny"}'
        assert await metric(server, ends) == 1

    with_held_clock(model_folder, test, ONE_ROW)


@pytest.mark.parametrize(("route", "body"), [(CHAT, chat_body()), (TEXT, text_body())])
def test_a_deadline_that_passes_while_tokens_come_ends_a_whole_answer_with_its_text(
    model_folder: Path, route: str, body: Json
) -> None:
    async def test(server: Running, clock: ManualClock) -> None:
        full = (await server.http.post(route, json={**body, "max_tokens": 30})).json()["choices"][0]
        asking = asyncio.create_task(server.http.post(route, json={**body, "max_tokens": ENDLESS, "timeout": SOON}))
        steps = server.engine.steps
        await until(lambda: server.engine.steps > steps + 5)
        clock.advance(1)
        answer = await asking
        assert answer.status_code == 200
        choice = answer.json()["choices"][0]
        assert choice["finish_reason"] == "timeout"
        text, whole = (one["text"] if route == TEXT else one["message"]["content"] for one in (choice, full))
        assert text
        assert whole.startswith(text) or text.startswith(whole)
        assert 0 < answer.json()["usage"]["completion_tokens"] < ENDLESS
        assert [reason for _, reason in server.engine.aborted] == [FinishReason.TIMEOUT]
        assert await metric(server, 'tiercel_timeouts_total{limit="timeout",stage="running"}') == 1

    with_held_clock(model_folder, test, SLOW)


@pytest.mark.parametrize(("route", "body"), [(CHAT, chat_body()), (TEXT, text_body())])
def test_a_deadline_that_passes_while_tokens_come_ends_a_stream(model_folder: Path, route: str, body: Json) -> None:
    async def test(server: Running, clock: ManualClock) -> None:
        wish = {
            **body,
            "stream": True,
            "max_tokens": ENDLESS,
            "timeout": SOON,
            "stream_options": {"include_usage": True},
        }
        asking = asyncio.create_task(server.http.post(route, json=wish))
        await until(lambda: server.engine.steps > 5)
        clock.advance(1)
        *events, end, usage = events_of((await asking).text)
        assert [event["choices"][0]["finish_reason"] for event in events] == [None] * len(events)
        assert end["choices"][0]["finish_reason"] == "timeout"
        assert 0 < usage["usage"]["completion_tokens"] < ENDLESS

    with_held_clock(model_folder, test, SLOW)


@pytest.mark.parametrize("stream", [False, True])
def test_the_choices_of_several_prompts_end_together(model_folder: Path, stream: bool) -> None:
    """Four of six sequences run; the two in the queue end with an empty text."""

    async def test(server: Running, clock: ManualClock) -> None:
        wish = text_body(["a", "b"], n=3, max_tokens=ENDLESS, timeout=SOON, stream=stream)
        asking = asyncio.create_task(server.http.post(TEXT, json=wish))
        await until(lambda: server.engine.steps > 5)
        clock.advance(1)
        answer = await asking
        assert answer.status_code == 200
        choices = [one for event in (events_of(answer.text) if stream else [answer.json()]) for one in event["choices"]]
        ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        assert ends == ["timeout"] * 6
        texts = {index: "".join(one["text"] for one in choices if one["index"] == index) for index in range(6)}
        assert [bool(texts[index]) for index in range(6)] == [True] * 4 + [False] * 2
        assert len(server.engine.aborted) == 6

    with_held_clock(model_folder, test, Script(step_s=0.02, max_running=4))


def test_a_choice_that_has_ended_keeps_its_finish_reason(model_folder: Path) -> None:
    """The first prompt ends at once with a stop token; the second one is never computed."""

    async def test(server: Running, clock: ManualClock) -> None:
        wish = text_body([[5], [6]], max_tokens=ENDLESS, timeout=SOON, stop_token_ids=[5])
        asking = asyncio.create_task(server.http.post(TEXT, json=wish))
        await until(lambda: server.context.client.sequences.num_unfinished == 1)
        clock.advance(1)
        choices = (await asking).json()["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["stop", "timeout"]

    with_held_clock(model_folder, test, Script(step_s=0.02))


def test_a_deadline_holds_while_the_model_loads(model_folder: Path) -> None:
    async def test(server: Running, clock: ManualClock) -> None:
        asking = asyncio.create_task(server.http.post(TEXT, json=text_body(timeout=SOON)))
        await until(lambda: server.context.admission.num_reserved == 1)
        clock.advance(1)
        assert_exceeded(await asking)
        assert server.context.admission.num_reserved == 0
        assert server.engine.submitted == []

    with_held_clock(model_folder, test, Script(load_s=60), wait=False)


def test_a_deadline_after_comments_is_an_error_event(model_folder: Path) -> None:
    async def test(server: Running, clock: ManualClock) -> None:
        async with server.http.stream("POST", TEXT, json=text_body(stream=True, timeout=SOON)) as answer:
            assert answer.status_code == 200
            lines = answer.aiter_lines()
            assert await anext(lines) == ": keep-alive"
            clock.advance(1)
            rest = "\n".join([line async for line in lines])
        (error,) = events_of(rest)
        assert error["error"]["code"] == "deadline_exceeded"

    with_held_clock(model_folder, test, Script(step_s=60), sse_keep_alive_interval_s=0.05)


@pytest.mark.parametrize(
    ("header", "stream", "holds"),
    [("0.02", False, True), ("0.02", True, False), ("NOT_GIVEN", False, False), ("-1", False, False)],
)
@pytest.mark.sampled(2)
def test_the_read_timeout_of_the_sdks_bounds_whole_answers_a_second_later(
    model_folder: Path, header: str, stream: bool, holds: bool
) -> None:
    async def test(server: Running, clock: ManualClock) -> None:
        wish = text_body(stream=stream, max_tokens=100)
        headers = {"x-stainless-read-timeout": header}
        asking = asyncio.create_task(server.http.post(TEXT, json=wish, headers=headers))
        await until(lambda: server.engine.steps > 2)
        clock.advance(1)  # the client has given up; the server still computes, so that only one of them decides
        await asyncio.sleep(0.05)
        assert not asking.done()
        clock.advance(1)
        answer = await asking
        assert "timeout" not in answer.text or holds
        if holds:
            assert_exceeded(answer)
        else:
            assert answer.status_code == 200
        assert await metric(server, 'tiercel_timeouts_total{limit="read_timeout",stage="running"}') == holds

    with_held_clock(model_folder, test, SLOW)


@pytest.mark.parametrize("route", [CHAT, TEXT, "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("is_asked", [False, True])
@pytest.mark.sampled(2)
def test_a_whole_answer_that_was_cut_is_a_200_only_for_a_client_that_asked(
    model_folder: Path, route: str, is_asked: bool
) -> None:
    bodies: dict[str, Json] = {
        CHAT: chat_body(max_tokens=ENDLESS),
        TEXT: text_body(max_tokens=ENDLESS),
        "/v1/responses": {"model": "tiny", "input": "hi", "max_output_tokens": ENDLESS},
        "/v1/messages": {
            "model": "tiny",
            "max_tokens": ENDLESS,
            "messages": [{"role": "user", "content": "hi"}],
        },
    }

    async def test(server: Running, clock: ManualClock) -> None:
        more = {"timeout": 0.02} if is_asked else {}
        asking = asyncio.create_task(server.http.post(route, json={**bodies[route], **more}))
        await until(lambda: server.engine.steps > 5)
        clock.advance(3)
        answer = await asking
        assert answer.status_code == (200 if is_asked else 504), answer.text
        assert has_nothing(server)

    with_held_clock(model_folder, test, SLOW, request_timeout_s=2.0)


@pytest.mark.parametrize(
    ("own_s", "limit"), [(None, "request_timeout"), (5.0, "request_timeout"), (2.0, "timeout"), (1.0, "timeout")]
)
@pytest.mark.sampled(2)
def test_the_smallest_limit_holds(model_folder: Path, own_s: float | None, limit: str) -> None:
    async def test(server: Running, clock: ManualClock) -> None:
        headers = {"x-stainless-read-timeout": "600.0"}
        asking = asyncio.create_task(server.http.post(TEXT, json=text_body(timeout=own_s), headers=headers))
        await until(lambda: server.engine.live == 1)
        clock.advance(0.5)
        await asyncio.sleep(0.05)
        assert not asking.done()
        clock.advance(2)
        assert_exceeded(await asking)
        assert await metric(server, f'tiercel_timeouts_total{{limit="{limit}",stage="waiting"}}') == 1

    with_held_clock(model_folder, test, Script(step_s=60), request_timeout_s=2.0)


@pytest.mark.parametrize("value", ["1", True, 0, -1, 1e9, [1], {}])
@pytest.mark.parametrize(("route", "body"), [(CHAT, chat_body()), (TEXT, text_body())])
def test_a_wrong_timeout_is_refused_by_name(model_folder: Path, route: str, body: Json, value: object) -> None:
    async def test(server: Running, _clock: ManualClock) -> None:
        answer = await server.http.post(route, json={**body, "timeout": value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "timeout"

    with_held_clock(model_folder, test, SLOW)


def test_a_client_that_leaves_at_its_deadline_leaves_nothing_behind(model_folder: Path) -> None:
    async def test(server: Running, clock: ManualClock) -> None:
        wishes = [text_body(stream=stream, max_tokens=ENDLESS, timeout=SOON) for stream in (True, False) * 4]
        asking = [asyncio.create_task(server.http.post(TEXT, json=wish)) for wish in wishes]
        await until(lambda: server.engine.live == len(wishes) and server.engine.steps > 2)
        clock.advance(1)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await until(lambda: has_nothing(server))
        assert len(server.engine.aborted) == len(wishes)

    with_held_clock(model_folder, test, SLOW)


def test_the_openai_client_reads_the_finish_reason(model_folder: Path) -> None:
    """The SDK does not know the reason `timeout`; it passes it on."""

    async def test(server: Running, clock: ManualClock) -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:

            async def whole() -> str | None:
                answer = await client.chat.completions.create(
                    model="tiny",
                    messages=[{"role": "user", "content": "hello"}],
                    max_tokens=ENDLESS,
                    extra_body={"timeout": SOON},
                )
                return answer.choices[0].finish_reason

            async def streamed() -> str | None:
                stream = await client.chat.completions.create(
                    model="tiny",
                    messages=[{"role": "user", "content": "hello"}],
                    max_tokens=ENDLESS,
                    stream=True,
                    extra_body={"timeout": SOON},
                )
                return [chunk.choices[0].finish_reason async for chunk in stream][-1]

            async def helped() -> str | None:
                async with client.chat.completions.stream(
                    model="tiny",
                    messages=[{"role": "user", "content": "hello"}],
                    max_tokens=ENDLESS,
                    extra_body={"timeout": SOON},
                ) as stream:
                    return (await stream.get_final_completion()).choices[0].finish_reason

            tasks = [asyncio.create_task(ask()) for ask in (whole, streamed, helped)]
            await until(lambda: server.engine.live == 3)
            steps = server.engine.steps
            await until(lambda: server.engine.steps > steps + 2)
            clock.advance(1)
            assert await asyncio.gather(*tasks) == ["timeout"] * 3

    with_held_clock(model_folder, test, SLOW)
