"""Requests that are not valid HTTP, too large, late or of another protocol; and valid ones in unusual pieces."""

import asyncio
import json
import random
from pathlib import Path

import pytest

from tests.seeds import fresh_seeds
from tests.server.fake_engine import Script
from tests.server.harness import Running, chat_body, server_settings, text_body, until, with_server
from tests.server.http.raw_client import RawAnswer, exchange, split_answers
from tiercel.server.http.framing import MAX_HEAD_BYTES, MAX_HEADER_LINES
from tiercel.values.units import KIB, MIB

HEAD = b"GET /version HTTP/1.1\r\nHost: localhost\r\n"
VERSION = HEAD + b"\r\n"
CLOSE = b"Connection: close\r\n"
BODY = json.dumps(chat_body(max_tokens=2)).encode()


def post(body: bytes = BODY, *lines: bytes, route: bytes = b"/v1/chat/completions") -> bytes:
    head = [b"POST %b HTTP/1.1" % route, b"Host: localhost", b"Content-Type: application/json", *lines]
    return b"\r\n".join([*head, b"Content-Length: %d" % len(body), b"", body])


def post_chunked(body: bytes, size: int, extension: bytes = b"", trailers: bytes = b"", lines: bytes = b"") -> bytes:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Transfer-Encoding: chunked\r\n"
    chunks = [body[at : at + size] for at in range(0, len(body), size)]
    framed = b"".join(b"%x%b\r\n%b\r\n" % (len(chunk), extension, chunk) for chunk in chunks)
    return head + lines + b"\r\n" + framed + b"0\r\n" + trailers + b"\r\n"


def expect_refusal(answer: RawAnswer, status: int, code: str) -> None:
    assert (answer.status, answer.error["code"]) == (status, code)
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["connection"] == "close"
    assert len(answer.headers["x-request-id"]) == 32


UNREADABLE: dict[str, bytes] = {
    "no request line": b"hello\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "unknown method": b"FETCH / HTTP/1.1\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "version": b"GET / HTTP/9.9\r\n\r\n",
    "URL": b"GET http:// HTTP/1.1\r\n\r\n",
    "URL of a tunnel": b"CONNECT x:80 HTTP/1.1\r\n\r\n",
    "bytes in a URL": b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
    "control character in a header": HEAD + b"A: \x00\r\n\r\n",
    "space before the colon": HEAD + b"A : 1\r\n\r\n",
    "folded header": HEAD + b"A: 1\r\n 2\r\n\r\n",
    "bare line ends": b"GET / HTTP/1.1\nHost: localhost\n\n",
    "length that is no number": HEAD + b"Content-Length: 1x\r\n\r\n",
    "negative length": HEAD + b"Content-Length: -1\r\n\r\n",
    "length beyond 64 bits": HEAD + b"Content-Length: 99999999999999999999\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "length and chunks": HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    "unknown transfer encoding": post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: gzip"),
    **{
        f"transfer encoding {value!r}": post_chunked(BODY, 10).replace(b"Encoding: chunked", b"Encoding: " + value)
        for value in (
            *(b"identity", b"identity, chunked", b"chunked, chunked", b"chunked, gzip", b"gzip", b"chunked;q=1"),
            *(
                b", chunked",
                b"chunked,",
                b"\x0bchunked",
                b"xchunked",
                b"nonsense, chunked",
                b"",
                b"gzip, chunked, chunked",
            ),
            *(b"gzip\r\nTransfer-Encoding: identity, chunked", b"chunked\r\nTransfer-Encoding: chunked"),
            *(b"chunked\r\n foo", b"\r\n chunked", b"chunked\r\nContent-Length: 5", b'"chunked"'),
        )
    },
    "chunks in HTTP/1.0": post_chunked(BODY, 10).replace(b"HTTP/1.1", b"HTTP/1.0"),
    "chunks twice beside an upgrade": post_chunked(BODY, 10, lines=b"Connection: upgrade\r\nUpgrade: h2c\r\n").replace(
        b"chunked\r\n", b"chunked, chunked\r\n"
    ),
    "size of a chunk": post_chunked(BODY, 10).replace(b"\r\na\r\n", b"\r\nxyz\r\n"),
    "end of a chunk": post_chunked(BODY, 10).replace(b"\r\na\r\n", b"\r\n9\r\n"),
    "size of a chunk beyond 64 bits": post_chunked(BODY, 10).replace(b"\r\na\r\n", b"\r\n" + b"f" * 20 + b"\r\n"),
}


def test_unreadable_requests_get_an_error_as_json(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for name, sent in UNREADABLE.items():
            answers = split_answers(await exchange(server.port, sent))
            assert len(answers) == 1, name
            expect_refusal(answers[0], 400, "invalid_http")
        await until(lambda: not server.server.server_state.tasks)
        assert server.engine.steps == 0
        page = (await server.http.get("/metrics")).text
        name = 'http_requests_total{handler="none",method="other",status="4xx"}'
        assert f"{name} {len(UNREADABLE)}.0" in page

    with_server(server_settings(model_folder), test)


@pytest.mark.parametrize("value", [b"gzip, chunked", b"GZIP ,\tChunked", b"gzip\r\nTransfer-Encoding: chunked"])
def test_codings_that_the_server_does_not_decode_are_named(model_folder: Path, value: bytes) -> None:
    async def test(server: Running) -> None:
        sent = post_chunked(BODY, 10).replace(b"Encoding: chunked", b"Encoding: " + value)
        (answer,) = split_answers(await exchange(server.port, sent))
        expect_refusal(answer, 501, "unsupported_transfer_coding")

    with_server(server_settings(model_folder), test)


@pytest.mark.parametrize("value", [b"Chunked", b"CHUNKED"])
def test_chunks_are_read_however_they_are_spelt(model_folder: Path, value: bytes) -> None:
    async def test(server: Running) -> None:
        sent = post_chunked(BODY, 10, lines=CLOSE).replace(b"Encoding: chunked", b"Encoding: " + value)
        (answer,) = split_answers(await exchange(server.port, sent))
        assert answer.status == 200

    with_server(server_settings(model_folder), test)


def too_large() -> dict[str, bytes]:
    many = b"".join(b"h%d:\r\n" % number for number in range(20_000))
    return {
        "a header of 10 MB": HEAD + b"A: " + b"a" * 10 * MIB + b"\r\n\r\n",
        "headers without an end": HEAD + (b"A: " + b"a" * 60_000 + b"\r\n") * 100,
        "a name of 1 MB": HEAD + b"a" * MIB,
        "many short lines": HEAD + many,
        "a request line without an end": b"GET /" + b"a" * MIB,
        "line ends before a request": b"\r\n" * MIB,
        "one byte too many": HEAD + b"A: " + b"a" * (MAX_HEAD_BYTES + 1 - len(HEAD) - 7) + b"\r\n\r\n",
        "one line too many": HEAD + b"A: 1\r\n" * MAX_HEADER_LINES + b"\r\n",
        "second request": VERSION + HEAD + b"A: " + b"a" * MIB,
    }


def test_heads_beyond_the_limits_are_refused(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for name, sent in too_large().items():
            *before, answer = split_answers(await exchange(server.port, sent))
            assert len(before) == (name == "second request"), name
            expect_refusal(answer, 431, "headers_too_large")

    with_server(server_settings(model_folder), test)


def test_framing_of_chunks_beyond_the_limit_is_refused(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for name, sent in {
            "an extension": post_chunked(BODY, len(BODY), b";" + b"a" * MIB),
            "many extensions": post_chunked(BODY, 1, b";" + b"a" * 2000),
            "a trailer": post_chunked(BODY, len(BODY), trailers=b"A: " + b"a" * MIB + b"\r\n"),
            "trailers": post_chunked(BODY, len(BODY), trailers=b"a:\r\n" * MIB),
            "zeros of a size": post_chunked(BODY, len(BODY)).replace(b"\r\n\r\n", b"\r\n\r\n" + b"0" * MIB, 1),
        }.items():
            answers = split_answers(await exchange(server.port, sent))
            assert len(answers) == 1, name
            status = 400 if name == "zeros of a size" and answers[0].status == 400 else 431
            expect_refusal(answers[0], status, "invalid_http" if status == 400 else "headers_too_large")
        await until(lambda: not server.server.server_state.tasks)

    with_server(server_settings(model_folder), test)


def test_heads_at_the_limits_are_served(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        head = HEAD + CLOSE
        for sent in (
            head + b"A: " + b"a" * (MAX_HEAD_BYTES - len(head) - 7) + b"\r\n\r\n",
            head + b"A: 1\r\n" * (MAX_HEADER_LINES - 2) + b"\r\n",
            b"\r\n\r\n" + head + b"\r\n",
            post_chunked(BODY, 1, b";" + b"a" * 100, b"a: 1\r\n" * 200, CLOSE),
        ):
            answers = split_answers(await exchange(server.port, sent))
            assert [answer.status for answer in answers] == [200]

    with_server(server_settings(model_folder), test)


def test_trailers_are_no_headers(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        sent = post_chunked(BODY, 10, trailers=b"x-request-id: trailer\r\n", lines=CLOSE)
        (answer,) = split_answers(await exchange(server.port, sent))
        assert answer.status == 200
        assert answer.headers.get("x-request-id") != "trailer"

    with_server(server_settings(model_folder), test)


UPGRADES = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA",
    b"Connection: Upgrade\r\nUpgrade: websocket",
    b"Connection: keep-alive, upgrade\r\nUpgrade: TLS/1.0, h2c",
    b"Upgrade: h2c",
)


@pytest.mark.parametrize("upgrade", UPGRADES, ids=["h2c", "websocket", "list", "without connection"])
def test_an_upgrade_is_ignored_and_the_body_is_read(model_folder: Path, upgrade: bytes) -> None:
    async def test(server: Running) -> None:
        chunked = post_chunked(BODY, 7, lines=upgrade + b"\r\n")
        get = HEAD + upgrade + b"\r\n\r\n"
        sent = post(BODY, upgrade) + get + chunked + post(BODY, upgrade, CLOSE.strip())
        for pieces in ([sent], [sent[at : at + 11] for at in range(0, len(sent), 11)]):
            answers = split_answers(await exchange(server.port, *pieces))
            assert [answer.status for answer in answers] == [200, 200, 200, 200]
            assert len({json.loads(answers[at].body)["choices"][0]["message"]["content"] for at in (0, 2, 3)}) == 1

    with_server(server_settings(model_folder), test)


def test_pipelined_requests_are_answered_in_order_before_an_error(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        texts = [post(json.dumps(text_body("a " * count, max_tokens=1)).encode(), route=b"/v1/completions")
                 for count in range(1, 6)]  # fmt: skip
        answers = split_answers(await exchange(server.port, b"".join(texts) + VERSION + b"oops\r\n\r\n" + VERSION))
        assert [answer.status for answer in answers] == [200] * 6 + [400]
        counts = [json.loads(answer.body)["usage"]["prompt_tokens"] for answer in answers[:5]]
        assert counts == sorted(counts)
        assert len(set(counts)) == 5
        expect_refusal(answers[-1], 400, "invalid_http")

    with_server(server_settings(model_folder), test, Script(step_s=0.02))


def test_a_broken_body_behind_another_request_leaves_its_answer(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        broken = post_chunked(BODY, 10).replace(b"\r\na\r\n", b"\r\nxyz\r\n")
        answers = split_answers(await exchange(server.port, post() + broken))
        assert [answer.status for answer in answers] == [200, 400]

    with_server(server_settings(model_folder), test, Script(step_s=0.02))


def test_many_pipelined_requests_wait_outside_the_parser(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        count = 3000
        received = await exchange(server.port, post() + VERSION * count + HEAD + CLOSE + b"\r\n", limit_s=60)
        assert [answer.status for answer in split_answers(received)] == [200] * (count + 2)

    with_server(server_settings(model_folder), test, Script(step_s=0.02))


def test_a_client_that_waits_for_continue_gets_it(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        head, _, body = post(BODY, b"Expect: 100-continue", CLOSE.strip()).partition(b"\r\n\r\n")
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head + b"\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        (answer,) = split_answers(await reader.read())
        assert answer.status == 200
        writer.close()

    with_server(server_settings(model_folder), test)


def test_the_end_of_the_client_side_before_the_answer_is_a_disconnect(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        assert await exchange(server.port, post(json.dumps(chat_body(max_tokens=200)).encode()), end=True) == b""
        await until(lambda: not server.server.server_state.connections and not server.server.server_state.tasks)
        assert not server.context.client.sequences.num_open

    with_server(server_settings(model_folder), test, Script(step_s=0.02))


def random_pieces(rng: random.Random, sent: bytes) -> list[bytes]:
    """Split bytes at random places; a small number of pieces as often as a large one."""
    cuts = sorted(rng.randrange(len(sent) + 1) for _ in range(rng.choice([0, 1, 2, 5, 40])))
    return [sent[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(sent)], strict=True)]


@pytest.mark.parametrize("seed", [1, 2, *fresh_seeds(2)])
def test_any_split_of_requests_gives_the_same_answers(model_folder: Path, seed: int) -> None:
    """Random requests on one connection, cut at random places, are answered as they are one by one."""
    rng = random.Random(seed)
    kinds: list[tuple[bytes, int]] = [
        (VERSION, 200),
        (post(), 200),
        (post(BODY, UPGRADES[0]), 200),
        (post(b"{}"), 400),
        (post(b"\r\n\r\n" * 3000), 400),
        (b"\r\n" + HEAD + b"A: " + b"a" * 60_000 + b"\r\n\r\n", 200),
        (b"GET /absent HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    ]
    kinds += [(post_chunked(BODY, size, b";x=y", b"T: 1\r\n"), 200) for size in (1, 13, 1000)]
    kinds += [(post_chunked(b"\r\n\r\n" * 3000, size), 400) for size in (3, 4096)]
    last: list[tuple[bytes, int]] = [
        (HEAD + CLOSE + b"\r\n", 200),
        *((sent, 400) for sent in UNREADABLE.values()),
        # up to 8 KiB of a head are not counted if it begins in the same slice as the end of a chunked body
        (HEAD + b"A: " + b"a" * (MAX_HEAD_BYTES + 8 * KIB) + b"\r\n\r\n", 431),
        (HEAD + b"A: 1\r\n" * 101 + b"\r\n", 431),
    ]

    async def test(server: Running) -> None:
        for _ in range(15):
            chosen = [*rng.choices(kinds, k=rng.randrange(6)), rng.choice(last)]
            pieces = random_pieces(rng, b"".join(sent for sent, _ in chosen))
            answers = split_answers(await exchange(server.port, *pieces, limit_s=60))
            assert [answer.status for answer in answers] == [status for _, status in chosen]
        await until(lambda: not server.server.server_state.tasks)

    with_server(server_settings(model_folder), test)


@pytest.mark.parametrize("seed", [1, 2, *fresh_seeds(2)])
def test_random_damage_gets_no_server_error_and_leaves_nothing_behind(model_folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    bases = [VERSION, post(), post_chunked(BODY, 20, b";x=y", b"T: 1\r\n"), post(BODY, UPGRADES[0]), HEAD + b"A: 1\r\n"]
    inserts = [b"\r\n", b"\n", b"\x00", b":", b" ", b"chunked", b"0", b"Content-Length: 5\r\n", b"\xff", b"HTTP/1.1"]

    async def test(server: Running) -> None:
        for _ in range(60):
            sent = bytearray(b"".join(rng.choices(bases, k=rng.randrange(1, 4))))
            for _ in range(rng.choice([1, 1, 2, 10])):
                at = rng.randrange(len(sent) + 1)
                match rng.randrange(3):
                    case 0:
                        sent[at : at + 1] = rng.randbytes(1)
                    case 1:
                        sent[at:at] = rng.choice(inserts)
                    case _:
                        del sent[at : at + rng.randrange(1, 20)]
            received = await exchange(server.port, *random_pieces(rng, bytes(sent)), end=True)
            assert b"HTTP/1.1 5" not in received, bytes(sent)
        await until(lambda: not server.server.server_state.connections and not server.server.server_state.tasks)
        assert (await server.http.get("/health")).status_code == 200

    with_server(server_settings(model_folder), test)
