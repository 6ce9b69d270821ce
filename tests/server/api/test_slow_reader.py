"""Clients that read slowly: what waits for them is limited, nothing is lost, and only their request ends."""

import asyncio
import json
import re
import socket
from array import array
from pathlib import Path

import pytest

from tests.server.fake_engine import Script
from tests.server.harness import Running, server_settings, text_body, until, with_server
from tiercel.server.api.hold import Hold
from tiercel.server.api.replies.completion import TextShape
from tiercel.server.api.replies.head import ReplyHead
from tiercel.server.api.stream import EventStream, StreamRules
from tiercel.server.api.whole import WholeReply
from tiercel.server.client.choice_text import ChoiceText
from tiercel.server.client.collector import Mailbox
from tiercel.server.client.generation import Generation
from tiercel.server.client.logprobs import DrawnTokens, PackedLogprobs
from tiercel.server.client.prompt_answer import PromptAnswer
from tiercel.server.client.sequences import SequenceStart
from tiercel.server.http.watch import SlowReaderError
from tiercel.server.text.detokenizer import make_detokenizer
from tiercel.server.text.stop import TextRules
from tiercel.values.request import SamplingParams, pack_tokens
from tiercel.values.units import KIB

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
@pytest.mark.sampled(1)
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
@pytest.mark.sampled(2)
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


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_takes_nothing_for_the_limit_is_ended(model_folder: Path, is_stream: bool) -> None:
    """Its answer is far smaller than what may wait, so that only the time ends it."""

    async def test(server: Running) -> None:
        context, vocabulary = server.context, server.context.codec.vocabulary
        mailbox, choices = (
            Mailbox(),
            [ChoiceText(make_detokenizer(vocabulary, [5], skip_special_tokens=True), TextRules(), vocabulary, (), 1)],
        )
        start = SequenceStart(prompt=pack_tokens([5]), num_prompt=1, params=SamplingParams(max_tokens=5), n=1)
        submission = context.client.submit([start], mailbox, context.clock.now_s())
        generation = Generation(context.client, submission, mailbox, choices, 1, context.clock)
        shape = TextShape(
            ReplyHead(id="cmpl-1", created=0, model="tiny", with_logprobs=False, with_details=False, role="assistant")
        )
        shape.begin([PromptAnswer([5], None, DrawnTokens(PackedLogprobs(), vocabulary), lambda: array("f"))])
        rules = StreamRules(patience_s=0.1)
        answer = (
            EventStream(generation, shape, rules, str, Hold(lambda: None))
            if is_stream
            else WholeReply(generation, shape, rules, str, vocabulary, Hold(lambda: None))
        )

        async def never(*_message: object) -> dict[str, object]:
            return await asyncio.get_running_loop().create_future()

        with pytest.raises(SlowReaderError):
            async with asyncio.timeout(10):
                await answer({"type": "http", "http_version": "1.1"}, never, never)
        await until(lambda: server.engine.live == 0)

    with_server(server_settings(model_folder), test)
