"""How events of streams are written: within the handling of a report, or by a task that waits for the client."""

import asyncio
import json
import re
from array import array
from pathlib import Path

import pytest

from tests.server.fake_engine import Script
from tests.server.harness import Running, chat_body, running, server_settings, text_body, until, with_server
from tiercel.server.text.tokenizer import TextCodec
from tiercel.values.ids import SeqId
from tiercel.wire.frames import Report, encode_frame

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_OWN = re.compile(rb'"id":"[^"]*","object":"([^"]*)","created":\d+')  # differs from answer to answer


async def _raw_stream(server: Running, route: str, body: dict[str, object]) -> list[bytes]:
    """Return the chunks of a streamed answer as they were sent, without the fields that differ."""
    text = json.dumps(body)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(
        f"POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(text)}\r\n\r\n{text}".encode()
    )
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    chunks: list[bytes] = []
    while size := int(await reader.readline(), 16):
        chunks.append(_OWN.sub(rb"\1", (await reader.readexactly(size + 2))[:-2]))
    writer.close()
    return chunks


@pytest.mark.parametrize(
    ("route", "extra"),
    [
        (CHAT, {}),
        (TEXT, {}),
        (TEXT, {"n": 3, "seed": 5}),
        (CHAT, {"logprobs": True, "top_logprobs": 2}),
        (TEXT, {"logprobs": 1}),
        (CHAT, {"stop": ["ree f"]}),
        (CHAT, {"stream_options": {"include_usage": True}}),
        (TEXT, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    ],
)
def test_both_ways_of_writing_send_the_same_bytes(
    model_folder: Path, codec: TextCodec, route: str, extra: dict[str, object]
) -> None:
    reply = tuple(codec.encode('one "two"\n three four 🙂\u2028 naïve', add_special_tokens=False))
    body = (chat_body if route == CHAT else text_body)(stream=True, max_tokens=len(reply), **extra)

    async def test(*, writes_bodies: bool) -> list[bytes]:
        script = Script(reply=reply, step_s=0.005)
        async with running(server_settings(model_folder), script, writes_bodies=writes_bodies) as server:
            return await _raw_stream(server, route, body)

    sent = {way: b"".join(asyncio.run(test(writes_bodies=way))) for way in (True, False)}
    assert _by_choice(sent[True]) == _by_choice(sent[False])
    assert sent[True].endswith(b"data: [DONE]\n\n")


def _by_choice(body: bytes) -> dict[bytes, list[bytes]]:
    """Return the events of each choice in order: events of different choices may be sent in any order."""
    events: dict[bytes, list[bytes]] = {}
    for one in body.split(b"\n\n"):
        found = re.search(rb'"index":(\d+)', one)
        events.setdefault(b"" if found is None else found[1], []).append(one)
    return events


def test_a_step_is_one_chunk_and_steps_that_arrive_together_share_one(model_folder: Path, codec: TextCodec) -> None:
    tokens = codec.encode("a b c d e f g h", add_special_tokens=False)

    async def test(server: Running) -> None:
        asking = asyncio.create_task(
            _raw_stream(server, TEXT, {**text_body([5, 6], stream=True), "max_tokens": len(tokens)})
        )
        await until(lambda: server.engine.live == 1)
        seq = server.engine.submitted[0].id
        frames = [encode_frame(_report(seq, token)) for token in tokens]
        for step in (frames[0], frames[1], frames[2], b"".join(frames[3:6])):
            server.engine.send_bytes(step)
            await asyncio.sleep(0.1)
        server.engine.die()
        chunks = [chunk for chunk in await asking if b"error" not in chunk and b"DONE" not in chunk]
        assert [chunk.count(b"data: ") for chunk in chunks] == [1, 1, 1, 3]
        texts = re.findall(r'"text":"([^"]*)"', b"".join(chunks).decode())
        assert "".join(texts) == codec.decode(tokens[:6])

    with_server(server_settings(model_folder), test, Script(step_s=60.0))


def test_comments_leave_the_short_way_of_tokens_open(model_folder: Path) -> None:
    """Single tokens go from the report into the connection, before and after a comment."""

    async def test(server: Running) -> None:
        def is_open() -> bool:
            (facts,) = server.context.client.sequences.facts_by_seq.values()
            return facts.mailbox is not None and facts.mailbox.sink is not None

        async with server.http.stream("POST", TEXT, json=text_body(stream=True, max_tokens=200)) as answer:
            lines = answer.aiter_lines()
            for awaited in ("data: ", ": keep-alive", "data: "):
                while not (await anext(lines)).startswith(awaited):
                    pass
                await until(is_open)

    with_server(server_settings(model_folder), test, Script(step_s=0.3), sse_keep_alive_interval_s=0.1)


def _report(seq: SeqId, token: int) -> Report:
    return Report(seqs=array("Q", [seq]).tobytes(), tokens=array("I", [token]).tobytes())
