"""A client that leaves ends its work, in every state of its request."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable
from pathlib import Path

from tests.server.fake_engine import Script
from tests.server.harness import Running, chat_body, running, server_settings, text_body, until, with_server
from tiercel.values.outcome import FinishReason

TEXT = "/v1/completions"


def _has_nothing(server: Running) -> bool:
    client = server.context.client
    return server.engine.live == 0 and client.sequences.num_unfinished == 0 and client.sequences.num_tokenless == 0


async def _leave_when(
    server: Running, body: dict[str, object], condition: Callable[[], bool], route: str = TEXT
) -> None:
    """Send a request, wait for the condition, and disconnect."""
    asking = asyncio.create_task(server.http.post(route, json=body))
    await until(condition)
    assert not asking.done()
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking


def test_a_client_that_leaves_a_stream_ends_its_sequence_within_a_step(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        async with server.http.stream("POST", TEXT, json=text_body(stream=True, max_tokens=200)) as answer:
            async for _ in answer.aiter_lines():
                break
        await until(lambda: _has_nothing(server), 2)
        assert [reason for _, reason in server.engine.aborted] == [FinishReason.ABORT]

    with_server(server_settings(model_folder), test, Script(step_s=0.02))


def test_a_client_that_leaves_a_whole_answer_ends_its_sequence(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        await _leave_when(server, text_body(max_tokens=200), lambda: server.engine.steps > 2)
        await until(lambda: _has_nothing(server), 2)
        assert [reason for _, reason in server.engine.aborted] == [FinishReason.ABORT]

    with_server(server_settings(model_folder), test, Script(step_s=0.05))


def test_a_client_that_leaves_while_queued_leaves_the_queue(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        runner = asyncio.create_task(server.http.post(TEXT, json=text_body(max_tokens=20)))
        await until(lambda: len(server.engine.running) == 1)
        await _leave_when(server, text_body(stream=True), lambda: len(server.engine.waiting) == 1)
        await until(lambda: len(server.engine.waiting) == 0, 2)
        assert len(server.engine.running) == 1
        assert (await runner).status_code == 200
        await until(lambda: _has_nothing(server))

    with_server(server_settings(model_folder), test, Script(step_s=0.1, max_running=1))


def test_a_client_that_leaves_during_prefill_ends_its_sequence(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        await _leave_when(server, chat_body(stream=True), lambda: server.engine.live == 1, "/v1/chat/completions")
        await until(lambda: _has_nothing(server), 2)
        assert server.engine.steps == 0

    with_server(server_settings(model_folder), test, Script(step_s=3.0))


def test_a_client_that_leaves_while_the_model_loads_is_forgotten(model_folder: Path) -> None:
    async def test() -> None:
        async with running(server_settings(model_folder), Script(load_s=1.5), wait=False) as server:
            waiting = asyncio.create_task(server.http.post(TEXT, json=text_body(max_tokens=2)))
            await _leave_when(server, text_body(), lambda: server.context.admission.num_reserved == 2)
            await until(lambda: server.context.admission.num_reserved == 1)
            assert (await waiting).status_code == 200
            assert len(server.engine.submitted) == 1

    asyncio.run(test())


def test_a_client_that_leaves_the_text_routes_while_the_model_loads_is_forgotten(model_folder: Path) -> None:
    async def test() -> None:
        async with running(server_settings(model_folder), Script(load_s=5), wait=False) as server:
            admission = server.context.admission
            asked: dict[str, dict[str, object]] = {"/tokenize": text_body(), "/detokenize": {"tokens": [5]}}
            for route, body in asked.items():
                await _leave_when(server, body, lambda: admission.num_reserved == 1, route)
                await until(lambda: admission.num_reserved == 0, 2)

    asyncio.run(test())


def test_all_choices_of_a_request_end_together(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        await _leave_when(server, text_body(["a", "b"], n=3, max_tokens=200), lambda: server.engine.live == 6)
        await until(lambda: _has_nothing(server), 2)
        assert len(server.engine.aborted) == 6

    with_server(server_settings(model_folder), test, Script(step_s=0.02))


def test_three_cancelled_clients_leave_all_gauges_at_zero(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        all_run = asyncio.Event()

        def have_all_run() -> bool:  # a client that leaves early must not free room for others
            if len(server.engine.running) == 3:
                all_run.set()
            return all_run.is_set()

        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(_leave_when(server, text_body(max_tokens=200, stream=True), have_all_run))
        await until(lambda: _has_nothing(server))
        metrics = (await server.http.get("/metrics")).text
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert f'vllm:{name}{{engine="0",model_name="tiny"}} 0' in metrics.replace(".0\n", "\n").splitlines()
        assert 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 3\n' in metrics

    with_server(server_settings(model_folder), test, Script(step_s=0.02))


def test_a_client_that_does_not_read_is_cancelled_and_others_continue(model_folder: Path) -> None:
    """The buffers of the kernel and of the server fill first; then the mailbox overflows and the request ends."""

    async def test(server: Running) -> None:
        body = json.dumps(text_body(stream=True, max_tokens=90_000, logprobs=20)).encode()
        head = (
            f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(slow, ("127.0.0.1", server.port))
            await loop.sock_sendall(slow, head.encode() + body)
            await until(lambda: len(server.engine.running) == 1)
            other = await server.http.post(TEXT, json=text_body(max_tokens=5))
            assert other.status_code == 200
            await until(lambda: _has_nothing(server), 60)
            assert [reason for _, reason in server.engine.aborted] == [FinishReason.ABORT]

    with_server(server_settings(model_folder), test, Script(max_model_len=100_000, blocks_total=10_000))
