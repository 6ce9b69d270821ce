"""The memory of bodies that are not admitted: limited in total, and no client can hold all of it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import TypeVar

import pytest

from tests.server.fake_engine import Script
from tests.server.harness import Running, chat_body, running, server_settings, text_body, until, with_server
from tiercel.server.http.body import decoded_bytes
from tiercel.server.http.body_budget import BodyBudget, BodyHolding
from tiercel.values.errors import AdmissionError
from tiercel.values.units import MIB

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
T = TypeVar("T")


class Refusals:
    """A counter of refusals."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


async def _wait_in(holding: BodyHolding) -> None:
    with holding.displaceable():
        await asyncio.sleep(60)


@contextlib.asynccontextmanager
async def _waiting(budget: BodyBudget, *held: tuple[str, int]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Hold so many bytes for each owner, in requests that wait for their clients."""
    tasks: list[asyncio.Task[None]] = []

    async def hold(owner: str, size: int) -> None:
        with budget.hold(owner) as holding:
            holding.grow(size)
            await _wait_in(holding)

    for owner, size in held:
        tasks.append(asyncio.create_task(hold(owner, size)))
        await asyncio.sleep(0)
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _run(test: Coroutine[object, object, T]) -> T:
    return asyncio.run(test)  # type: ignore[arg-type]


async def _is_refused(task: asyncio.Task[None]) -> bool:
    try:
        async with asyncio.timeout(0.01):
            await asyncio.shield(task)
    except AdmissionError as error:
        assert (error.status, error.code) == (503, "overloaded")
        assert error.retry_after_s
        return True
    except TimeoutError:
        return False
    raise AssertionError


def test_what_was_held_is_released_in_every_way() -> None:
    budget = BodyBudget(lambda: 100, Refusals())
    with budget.hold("a") as one, budget.hold("b") as two:
        one.grow(30)
        two.grow(50)
        one.resize(10)
        assert budget.held_bytes == 60
    with pytest.raises(ZeroDivisionError), budget.hold("a") as one:
        one.grow(99)
        raise ZeroDivisionError
    assert budget.held_bytes == 0


def test_a_small_request_displaces_the_largest_of_the_same_client() -> None:
    async def test() -> None:
        refusals = Refusals()
        budget = BodyBudget(lambda: 100, refusals)
        async with _waiting(budget, ("a", 20), ("a", 40), ("a", 40)) as tasks:
            with budget.hold("a") as small:
                small.grow(5)
                assert budget.held_bytes == 65
                assert [await _is_refused(task) for task in tasks] == [False, False, True]  # of equal ones the newest
        assert budget.held_bytes == 0
        assert refusals.count == 1

    _run(test())


def test_a_client_that_holds_most_is_the_one_that_is_refused() -> None:
    async def test() -> None:
        budget = BodyBudget(lambda: 100, Refusals())
        async with _waiting(budget, *[("many", 10)] * 9, ("large", 10)) as tasks:
            with budget.hold("large") as large:
                large.grow(40)  # more than any single request of the other client, less than all of them
                assert sum([await _is_refused(task) for task in tasks]) == 4
            with budget.hold("many") as another, pytest.raises(AdmissionError):
                another.grow(60)
            assert not await _is_refused(tasks[0])

    _run(test())


def test_a_request_that_is_being_processed_is_not_ended_and_the_new_one_is_refused() -> None:
    budget = BodyBudget(lambda: 100, Refusals())
    with budget.hold("a") as busy, budget.hold("b") as new:
        busy.grow(100)
        with pytest.raises(AdmissionError):
            new.grow(1)
        assert (busy.bytes, new.bytes, budget.held_bytes) == (100, 0, 100)


def test_one_request_alone_may_exceed_the_limit() -> None:
    budget = BodyBudget(lambda: 100, Refusals())
    with budget.hold("a") as one:
        one.grow(80)
        one.grow(80)
        with budget.hold("b") as two, pytest.raises(AdmissionError):
            two.grow(1)


def test_a_client_that_leaves_while_it_is_displaced_is_cancelled_and_not_refused() -> None:
    async def test() -> None:
        budget = BodyBudget(lambda: 100, Refusals())
        async with _waiting(budget, ("a", 90)) as (task,):
            with budget.hold("b") as other:
                other.grow(20)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    _run(test())


@pytest.mark.parametrize(
    ("body", "least"),
    [
        (b'{"prompt":"' + b"a" * MIB + b'"}', MIB),
        (('{"prompt":"' + "a" * MIB + '🙂"}').encode(), 4 * MIB),
        (b'{"prompt":"' + b"a" * MIB + b'\\ud83d\\ude42"}', 4 * MIB),
        (b'{"prompt":[' + b"1000," * 9_999 + b"1000]}", 10_000 * 36),
    ],
)
def test_the_memory_of_a_decoded_body_is_not_underestimated(body: bytes, least: int) -> None:
    assert least <= decoded_bytes(body, 10**6) <= 1.3 * least + 1000


async def _send_part(server: Running, declared: int, part: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {declared}\r\n\r\n".encode() + part)
    return reader, writer


def test_bodies_that_never_end_leave_room_for_other_requests(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        clients = [await _send_part(server, MIB, b'{"prompt":"' + b"a" * 900_000) for _ in range(12)]
        await until(lambda: server.context.bodies.held_bytes > 3 * MIB)
        for body in (chat_body(max_tokens=2), chat_body("hello " * 20, max_tokens=2)):
            assert (await server.http.post(CHAT, json=body)).status_code == 200
        assert server.context.bodies.held_bytes <= 4 * MIB
        refused = 0
        for reader, writer in clients:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    head = await reader.readuntil(b"\r\n\r\n")
                    assert head.startswith(b"HTTP/1.1 503")
                    assert b"retry-after: " in head
                    refused += 1
            writer.close()
        assert refused >= 7
        page = (await server.http.get("/metrics")).text
        assert f'reason="body_memory"}} {refused}.0\n' in page
        assert f"tiercel_pending_body_limit_bytes {4 * MIB:.1f}"[:30] in page
        await until(lambda: server.context.bodies.held_bytes == 0)

    with_server(server_settings(model_folder), test, max_pending_body_bytes=4 * MIB)


def test_a_declared_length_holds_nothing(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        clients = [await _send_part(server, 8 * MIB - 1, b"{") for _ in range(20)]
        await until(lambda: server.context.bodies.held_bytes == 20)
        large = json.dumps(text_body("a" * (MIB // 2), max_tokens=1)).encode()
        answer = await server.http.post(TEXT, content=large, headers={"content-type": "application/json"})
        assert "maximum context length" in answer.text
        for _, writer in clients:
            writer.close()

    with_server(server_settings(model_folder), test, max_pending_body_bytes=2 * MIB)


def test_requests_that_wait_for_the_model_hold_their_bodies_and_give_way(model_folder: Path) -> None:
    async def test() -> None:
        settings = server_settings(model_folder)
        async with running(settings, Script(load_s=1.0), wait=False) as server:
            bodies = server.context.bodies
            text = "a" * 100
            waiting = [asyncio.create_task(server.http.post(TEXT, json=text_body(text, max_tokens=1))) for _ in "abc"]
            await until(lambda: server.context.admission.num_reserved == 3)
            assert bodies.held_bytes > 3 * 100
            for one in waiting:
                assert (await one).status_code == 200
            assert bodies.held_bytes == 0

    asyncio.run(test())


def test_a_long_answer_does_not_hold_its_body(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for stream in (True, False):
            asking = asyncio.create_task(server.http.post(TEXT, json=text_body(max_tokens=50, stream=stream)))
            await until(lambda: server.engine.live == 1)
            assert server.context.bodies.held_bytes == 0
            assert (await asking).status_code == 200

    with_server(server_settings(model_folder), test, Script(step_s=0.005))


def test_every_route_with_a_body_gives_its_memory_back(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        admin = {"authorization": "Bearer secret"}
        for route, body in ((TEXT, text_body()), (CHAT, chat_body()), ("/tokenize", text_body()), ("/detokenize", {})):
            await server.http.post(route, json=body)
        await server.http.patch("/admin/config", json={"max-num-queued-reqs": 5}, headers=admin)
        await server.http.put("/admin/tenants", json={}, headers=admin)
        assert server.context.bodies.held_bytes == 0

    with_server(server_settings(model_folder), test, admin_key="secret")
