"""Connections beyond the maximum, late headers, and the memory of unfinished requests."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import structlog

from tests.server.harness import Running, running, server_settings, text_body, until, with_server
from tests.server.http.raw_client import exchange, split_answers
from tiercel.server.http.gate import RESERVED_CONNECTIONS, ConnectionGate, ConnectionLimits
from tiercel.values.clock import ManualClock
from tiercel.values.errors import AdmissionError
from tiercel.values.units import MIB

LATE = 0.3


@contextlib.asynccontextmanager
async def idle(server: Running, count: int, sent: bytes = b"") -> AsyncIterator[list[asyncio.StreamWriter]]:
    """Keep idle connections open, which have sent these bytes."""
    before = len(server.server.server_state.connections)
    writers: list[asyncio.StreamWriter] = []
    for _ in range(count):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        writers.append(writer)
    await until(lambda: len(server.server.server_state.connections) == before + count)
    try:
        yield writers
    finally:
        for writer in writers:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def test_beyond_the_maximum_only_the_health_is_served(model_folder: Path) -> None:
    async def test() -> None:
        limits = ConnectionLimits(max_connections=5)
        async with running(server_settings(model_folder), limits=limits) as server:
            async with idle(server, 5) as writers:
                for path, status in ((b"/health", 200), (b"/health/live", 200), (b"/ready", 200), (b"/version", 503)):
                    (answer,) = split_answers(
                        await exchange(server.port, b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path)
                    )
                    assert (answer.status, answer.headers["connection"]) == (status, "close")
                assert answer.error["code"] == "too_many_connections"
                assert answer.error["type"] == "server_error"
                assert answer.headers["retry-after"] == "1"
                body = b'{"prompt": "a"}'
                post = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (
                    len(body),
                    body,
                )
                (answer,) = split_answers(await exchange(server.port, post))
                assert answer.status == 503
                writers[0].close()
                await until(lambda: len(server.server.server_state.connections) == 4)
                assert (await server.http.get("/version")).status_code == 200
            assert (await server.http.post("/v1/completions", json=text_body())).status_code == 200

    asyncio.run(test())


def test_connections_beyond_the_reserve_are_closed_at_once(model_folder: Path) -> None:
    async def test() -> None:
        limits = ConnectionLimits(max_connections=2)
        async with running(server_settings(model_folder), limits=limits) as server:
            async with idle(server, 2 + RESERVED_CONNECTIONS):
                (answer,) = split_answers(await exchange(server.port))
                assert (answer.status, answer.error["code"]) == (503, "too_many_connections")
            assert (await server.http.get("/health")).status_code == 200

    asyncio.run(test())


async def dribble(server: Running, begin: bytes, piece: bytes) -> bytes:
    """Send the beginning of a request, then piece after piece until the server answers; return the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(begin)
    received = bytearray()

    async def read() -> None:
        with contextlib.suppress(ConnectionError):  # a piece that crosses the answer can reset the connection after it
            while part := await reader.read(65536):
                received.extend(part)

    answering = asyncio.create_task(read())
    while not answering.done():
        writer.write(piece)
        await asyncio.wait([answering], timeout=LATE / 10)
    writer.close()
    return bytes(received)


def test_a_head_that_does_not_end_in_time_gets_408(model_folder: Path) -> None:
    async def test() -> None:
        limits = ConnectionLimits(header_timeout_s=LATE)
        async with running(server_settings(model_folder), limits=limits) as server:
            begun = b"GET /version HTTP/1.1\r\nHost: localhost\r\nA: b"
            whole = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
            assert await exchange(server.port) == b""
            for sent, statuses in ((begun, [408]), (whole + begun, [200, 408])):
                answers = split_answers(await exchange(server.port, sent))
                assert [answer.status for answer in answers] == statuses
                assert answers[-1].error["code"] == "request_timeout"

    asyncio.run(test())


def test_a_head_that_dribbles_is_ended_too(model_folder: Path) -> None:
    async def test() -> None:
        limits = ConnectionLimits(header_timeout_s=LATE)
        async with running(server_settings(model_folder), limits=limits) as server:
            answer = await dribble(server, b"GET /version HTTP/1.1\r\n", b"A: b\r\n")
            assert answer.startswith(b"HTTP/1.1 408 ")

    asyncio.run(test())


def test_a_body_that_dribbles_gets_408(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        answer = await dribble(server, head + b"Content-Length: 5000\r\n\r\n", b" ")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"request_timeout" in answer

    with_server(server_settings(model_folder), test, timeout_body_s=LATE)


def test_unfinished_heads_of_all_connections_have_a_limit(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        begun = b"GET /version HTTP/1.1\r\nHost: localhost\r\nA: " + b"a" * 60_000
        async with idle(server, 16 * MIB // len(begun), begun):
            (answer,) = split_answers(await exchange(server.port, begun))
            assert (answer.status, answer.error["code"]) == (503, "overloaded")
            assert (await server.http.get("/version")).status_code == 200
        await until(lambda: len(server.server.server_state.connections) <= 1)
        answers = split_answers(await exchange(server.port, begun + b"\r\nConnection: close\r\n\r\n"))
        assert [answer.status for answer in answers] == [200]

    with_server(server_settings(model_folder), test)


def test_refusals_are_logged_once_in_ten_seconds_for_each_code() -> None:
    clock = ManualClock(100)
    gate = ConnectionGate(ConnectionLimits(), clock)
    with structlog.testing.capture_logs() as lines:
        for _ in range(50):
            gate.note_refusal(gate.too_many(), "a")
        gate.note_refusal(AdmissionError(400, "no", code="invalid_http"), "b")
        clock.advance(10)
        gate.note_refusal(gate.too_many(), "c")
    assert [(line["code"], line["count"], line["request_id"]) for line in lines] == [
        ("too_many_connections", 1, "a"),
        ("invalid_http", 1, "b"),
        ("too_many_connections", 50, "c"),
    ]
