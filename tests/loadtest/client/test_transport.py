"""The transport against servers that keep, close and break connections."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import pytest

from tiercel.loadtest.client.connection import ArrivingBody
from tiercel.loadtest.client.http1 import BODY, Http1Transport
from tiercel.loadtest.client.sender import tls_context
from tiercel.values.clock import MonotonicClock

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@contextlib.asynccontextmanager
async def _client_of(serve: Serve) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    """Yield a client with our transport, and the URL of a server that runs `serve`."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    transport = Http1Transport(MonotonicClock(), connect_s=5, verify=tls_context(verify=True))
    async with server:
        try:
            async with httpx.AsyncClient(transport=transport) as client:
                yield client, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        finally:
            await asyncio.sleep(0.05)  # the server sees the end of its connections


def _ask(serve: Serve, times: int = 1) -> list[bytes]:
    """Send requests one after another over one transport and return the bodies."""

    async def ask() -> list[bytes]:
        found: list[bytes] = []
        async with _client_of(serve) as (client, url):
            for _ in range(times):
                found.append((await client.post(url, content=b"x")).content)
                await asyncio.sleep(0.02)
        return found

    return asyncio.run(ask())


def test_a_connection_is_used_again() -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while await reader.read(1000):
            writer.write(OK)
        writer.close()

    assert _ask(serve, 3) == [b"ok"] * 3
    assert connections == 1


def test_a_connection_that_the_server_closed_meanwhile_is_replaced() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        writer.write(OK)
        await writer.drain()
        writer.close()

    assert _ask(serve, 3) == [b"ok"] * 3


def test_a_body_without_a_length_ends_with_the_connection_and_interim_responses_are_skipped() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nConnection: close\r\n\r\nall ")
        await writer.drain()
        writer.write(b"of it")
        writer.close()

    assert _ask(serve) == [b"all of it"]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"", "without a response"),
        (b"HTTP/1.1 200", "mid-response"),
        (b"SMTP ready\r\n\r\n", "not valid HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n", "not valid HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", "mid-response"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "chunk size"),
    ],
)
def test_a_broken_response_is_an_error_that_names_the_defect(said: bytes, words: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        writer.write(said)
        writer.close()

    with pytest.raises(httpx.RemoteProtocolError, match=words):
        _ask(serve)


def test_pieces_are_stamped_when_they_arrive_even_without_a_listener() -> None:
    stamps: list[tuple[float, bytes]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\na")
        for piece in (b"b", b"c"):
            await writer.drain()
            await asyncio.sleep(0.1)
            writer.write(piece)
        await writer.drain()
        await reader.read(1)
        writer.close()

    async def listen() -> None:
        async with _client_of(serve) as (client, url):
            response = await client.send(httpx.Request("POST", url, content=b"x"), stream=True)
            await asyncio.sleep(0.15)  # nobody listens meanwhile: a and b have arrived
            body = response.extensions[BODY]
            assert isinstance(body, ArrivingBody)
            body.listen(lambda at_s, piece: stamps.append((at_s, piece)))
            await body.finished()
            await response.aclose()

    asyncio.run(listen())
    assert [piece for _, piece in stamps] == [b"a", b"b", b"c"]
    times = [at_s for at_s, _ in stamps]
    assert times == sorted(times)
    assert times[1] - times[0] >= 0.09
    assert times[2] - times[1] >= 0.09
