"""Clients that read slowly: what waits for them is limited, nothing is lost, and only their request ends."""

import asyncio
import json
import re
import socket
from pathlib import Path

import pytest

from tests.server.fake_engine import Script
from tests.server.harness import Running, server_settings, text_body, until, with_server
from tiercel.units import KIB

TEXT = "/v1/completions"
LIMIT_BYTES = 256 * KIB
LOGPROBS = [None, 20]


async def _connect(server: Running, body: dict[str, object]) -> socket.socket:
    """Send a request over a connection whose buffers in the kernel are small."""
    for listener in server.server.servers[0].sockets:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * KIB)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 * KIB)
    client.setblocking(False)
    loop, text = asyncio.get_running_loop(), json.dumps(body).encode()
    await loop.sock_connect(client, ("127.0.0.1", server.port))
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    await loop.sock_sendall(client, f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)
    return client


def _waiting_bytes(server: Running) -> int:
    """Return the bytes in mailboxes and in the buffers of connections."""
    facts = server.context.client.sequences.facts_by_seq.values()
    mailboxes = {one.mailbox for one in facts if one.mailbox is not None}
    connections = server.server.server_state.connections
    return sum(mailbox.unread_bytes for mailbox in mailboxes) + sum(
        one.transport.get_write_buffer_size() for one in connections
    )


@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize("logprobs", LOGPROBS)
def test_at_most_256_kib_and_a_step_wait_for_a_client_that_does_not_read(
    model_folder: Path, logprobs: int | None, n: int
) -> None:
    async def test(server: Running) -> None:
        body = text_body(stream=True, max_tokens=90_000, logprobs=logprobs, n=n, ignore_eos=True)
        with await _connect(server, body):
            await until(lambda: len(server.engine.running) == n)
            peak = 0
            while server.engine.live:
                peak = max(peak, _waiting_bytes(server))
                await asyncio.sleep(0)
            assert len(server.engine.aborted) == n
            step_bytes = n * 24 * (1 + (logprobs or 0)) * 4 + 4 * KIB
            assert LIMIT_BYTES / 2 < peak <= LIMIT_BYTES + step_bytes
        answer = await server.http.post(TEXT, json=text_body(max_tokens=5))
        assert answer.status_code == 200

    with_server(server_settings(model_folder), test, Script(max_model_len=100_000, blocks_total=100_000))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("logprobs", LOGPROBS)
def test_a_client_that_reads_late_and_in_small_pieces_gets_every_token(
    model_folder: Path, logprobs: int | None, n: int
) -> None:
    tokens = (800 if logprobs else 20_000) // n  # what the mailbox holds

    async def test(server: Running) -> None:
        body = text_body([5, 6, 7], stream=True, max_tokens=tokens, logprobs=logprobs, n=n, ignore_eos=True)
        loop, received = asyncio.get_running_loop(), b""
        with await _connect(server, body) as client:
            await until(lambda: _waiting_bytes(server) > 64 * KIB)
            while b"data: [DONE]" not in received:
                part = await loop.sock_recv(client, 8 * KIB)
                assert part, received[-500:]
                received += part
                await asyncio.sleep(0)
        texts: dict[int, str] = {}
        lines = re.sub(rb"\r\n[0-9a-f]+\r\n", b"", received.split(b"\r\n\r\n", 1)[1])
        for event in re.findall(rb"data: (\{.*\})", lines):
            for choice in json.loads(event)["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        expected = server.context.codec.decode(([5, 6, 7] * tokens)[:tokens])
        assert texts == dict.fromkeys(range(n), expected)

    with_server(server_settings(model_folder), test, Script(max_model_len=100_000, blocks_total=100_000))
