"""Compressed request bodies: decoded within the limit of bodies, in pieces that are counted before the next one."""

import asyncio
import bz2
import gzip
import json
import random
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace
from starlette.types import Message, Receive, Scope, Send

from tests.server.bodies import TEXT
from tests.server.harness import running, server_settings, text_body
from tiercel.server.api.body_limit import BodyLimit
from tiercel.server.http.content_coding import MAX_MEMBERS, PIECE_BYTES, ContentDecoder, content_coding
from tiercel.values.errors import AdmissionError

JSON = {"content-type": "application/json"}


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


FORMS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "members": ("gzip", lambda data: gzip.compress(data[:7]) + gzip.compress(data[7:]) + bytes(20)),
    "zlib": ("deflate", zlib.compress),
    "raw": ("deflate", raw_deflate),
}


def decoded(coding: str, data: bytes, cuts: list[int]) -> bytes:
    decoder = ContentDecoder(coding)
    pieces: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        decoder.feed(data[start:end])
        while piece := decoder.take():
            assert len(piece) <= PIECE_BYTES
            pieces.append(piece)
    decoder.finish()
    return b"".join(pieces)


@pytest.mark.parametrize("form", FORMS)
def test_any_split_of_a_body_gives_the_same_bytes(form: str) -> None:
    coding, compress = FORMS[form]
    rng = random.Random(form)
    data = rng.randbytes(3000) + bytes(3 * PIECE_BYTES)
    whole = compress(data)
    assert decoded(coding, whole, []) == data
    for _ in range(20):
        assert decoded(coding, whole, sorted(rng.sample(range(len(whole)), 5))) == data
    assert decoded(coding, whole[: len(whole) // 2] + whole[len(whole) // 2 :], list(range(1, 40))) == data


@pytest.mark.parametrize("form", FORMS)
def test_a_damaged_or_cut_body_is_refused(form: str) -> None:
    coding, compress = FORMS[form]
    data = compress(b'{"a": 1}' * 20)
    wrong = [data[: len(data) // 2], b"\0" * 10 + data, b"{}", data + (b"x" if form != "members" else b"xyz")]
    if coding == "deflate":
        wrong.append(data + data)  # gzip alone may have several members
    for body in wrong:
        with pytest.raises(AdmissionError, match=f"{coding} data") as caught:
            decoded(coding, body, [])
        assert caught.value.status == 400
    assert decoded(coding, b"", []) == b""


def test_the_header_is_read_as_clients_write_it() -> None:
    assert content_coding("") is content_coding("identity") is content_coding(" , ") is None
    assert content_coding("X-GZIP") == content_coding("gzip, identity") == "gzip"
    for value in ("br", "zstd", "gzip, gzip", "compress", "\x7f" * 1000):
        with pytest.raises(AdmissionError) as caught:
            content_coding(value)
        assert caught.value.status == 415 and len(caught.value.message) < 200


def test_compressed_requests_are_answered_and_others_named(model_folder: Path) -> None:
    settings = replace(server_settings(model_folder), max_body_bytes=100_000)
    body = json.dumps(text_body()).encode()

    async def test() -> None:
        async with running(settings) as server:

            async def post(content: bytes, *codings: str, path: str = TEXT) -> tuple[int, str, str | None]:
                headers = [*JSON.items(), *(("content-encoding", coding) for coding in codings)]
                answer = await server.http.post(path, content=content, headers=headers)
                code = None if answer.status_code == 200 else answer.json()["error"].get("code")
                return answer.status_code, answer.headers.get("accept-encoding", ""), code

            for coding, compress in FORMS.values():
                assert (await post(compress(body), coding))[0] == 200
            assert (await post(body, "identity"))[0] == 200
            assert await post(bz2.compress(body), "br") == (415, "gzip, deflate", "unsupported_encoding")
            assert (await post(gzip.compress(gzip.compress(body)), "gzip", "gzip"))[0] == 415
            assert await post(body, "gzip") == (400, "", "invalid_encoding")
            assert await post(gzip.compress(body)[:-4], "gzip") == (400, "", "invalid_encoding")
            # 64 MiB in 64 kB: refused at the limit, before the rest is decoded
            assert await post(gzip.compress(bytes(64 << 20)), "gzip") == (413, "", "request_too_large")
            # many members of nothing expand to nothing, but each costs time
            assert (await post(gzip.compress(body) + gzip.compress(b"") * (MAX_MEMBERS - 1), "gzip"))[0] == 200
            assert await post(gzip.compress(b"") * (MAX_MEMBERS + 1), "gzip") == (400, "", "invalid_encoding")
            assert (await post(gzip.compress(body), "gzip", path="/tokenize"))[0] == 200
            assert (await server.http.get("/v1/models", headers={"content-encoding": "br"})).status_code == 200

    asyncio.run(test())


def test_byte_order_marks(model_folder: Path) -> None:
    settings = server_settings(model_folder)
    text = json.dumps(text_body())

    async def test() -> None:
        async with running(settings) as server:
            marked = await server.http.post(TEXT, content=text.encode("utf-8-sig"), headers=JSON)
            assert marked.status_code == 200
            for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"):
                wide = await server.http.post(TEXT, content=text.encode(encoding), headers=JSON)
                assert wide.status_code == 400
                assert f"The body is {encoding[:6].upper()}" in wide.json()["error"]["message"]

    asyncio.run(test())


def test_a_body_of_many_pieces_leaves_the_loop_to_others_after_each() -> None:
    turns, seen = [0], list[int]()

    async def others() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            seen.append(turns[0])

    async def receive() -> Message:
        return {"type": "http.request", "body": gzip.compress(bytes(20 * PIECE_BYTES)), "more_body": False}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    async def test() -> None:
        busy = asyncio.create_task(others())
        scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-encoding", b"gzip")]}
        await BodyLimit(app, lambda: 40 * PIECE_BYTES, lambda: 0)(scope, receive, send)
        busy.cancel()

    asyncio.run(test())
    assert len(seen) >= 20
    assert all(later > earlier for earlier, later in pairwise(seen))


@pytest.mark.parametrize(("data", "status"), [(b"no gzip", 400), (gzip.compress(bytes(99 * PIECE_BYTES)), 413)])
def test_the_rest_of_a_refused_body_is_read_so_that_the_client_reads_the_refusal(data: bytes, status: int) -> None:
    """A connection that is closed with unread bytes is reset, and the answer with it."""
    coming = [{"type": "http.request", "body": body, "more_body": bool(body)} for body in (data, b"more", b"more", b"")]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with pytest.raises(AdmissionError) as refused:
            while (await receive())["more_body"]:
                pass
        assert refused.value.status == status

    async def receive() -> Message:
        return coming.pop(0)

    async def send(message: Message) -> None:
        raise AssertionError(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-encoding", b"gzip")]}
    asyncio.run(BodyLimit(app, lambda: 9 * PIECE_BYTES, lambda: 0)(scope, receive, send))
    assert not coming
