"""Responses in pieces of any size, and connections that must not be used again."""

import asyncio
from collections.abc import Sequence

import httpx
import pytest

from tiercel.loadtest.client.connection import Connection, ProtocolFault

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n1;name=x\r\n \r\n5\r\nworld\r\n0\r\nTrailer: x\r\n\r\n"
)
BY_LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n"


class _Wire(asyncio.Transport):
    """A transport that sends nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.is_aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Drop the data."""

    def abort(self) -> None:
        self.is_aborted = True


class _Received:
    """The pieces of a response that a connection handed on."""

    def __init__(self, pieces: Sequence[bytes], *, is_closed: bool = False) -> None:
        self.pieces: list[tuple[float, bytes]] = []
        self.idle: list[Connection] = []
        self.wire = _Wire()
        asyncio.run(self._feed(pieces, is_closed=is_closed))

    @property
    def text(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    async def _feed(self, pieces: Sequence[bytes], *, is_closed: bool) -> None:
        clock = iter(range(1_000_000))
        connection = Connection(lambda: float(next(clock)), set(), self.idle)
        connection.connection_made(self.wire)
        body = connection.send(b"")
        body.listen(lambda at_s, piece: self.pieces.append((at_s, piece)))
        for piece in pieces:
            connection.data_received(piece)
        if is_closed:
            connection.connection_lost(None)
        await body.head
        await body.finished()


def _cut(text: bytes, size: int) -> list[bytes]:
    return [text[at : at + size] for at in range(0, len(text), size)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(CHUNKED)])
def test_a_chunked_body_is_whole_in_pieces_of_any_size(size: int) -> None:
    found = _Received(_cut(CHUNKED, size))
    assert found.text == b"hello world"
    assert len(found.idle) == 1, "the connection can be used again"


def test_every_piece_has_the_time_at_which_it_arrived() -> None:
    found = _Received([BY_LENGTH, b"a", b"bc"])
    assert found.pieces == [(1.0, b"a"), (2.0, b"bc")]


def test_a_connection_with_bytes_behind_the_response_is_not_used_again() -> None:
    found = _Received([BY_LENGTH + b"abcdef"])
    assert found.text == b"abc"
    assert found.wire.is_aborted
    assert not found.idle


def test_the_body_of_a_second_response_is_not_part_of_the_first() -> None:
    found = _Received([BY_LENGTH + b"abc" + BY_LENGTH + b"def"])
    assert found.text == b"abc"
    assert not found.idle


def test_trailers_are_no_headers_of_the_next_response() -> None:
    async def ask_twice() -> list[list[tuple[bytes, bytes]]]:
        connection = Connection(lambda: 0.0, set(), [])
        connection.connection_made(_Wire())
        heads: list[list[tuple[bytes, bytes]]] = []
        for _ in range(2):
            body = connection.send(b"")
            connection.data_received(CHUNKED)
            heads.append((await body.head)[1])
        return heads

    first, second = asyncio.run(ask_twice())
    assert first == second == [(b"Transfer-Encoding", b"chunked")]


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2 \r\nhi\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 9\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\nContent-Length: 2 \n\nhi",
    ],
    ids=["blank after the size", "length and chunks", "bare line feeds"],
)
def test_a_server_that_is_not_strict_is_measured(response: bytes) -> None:
    assert _Received([response]).text == b"hi"


@pytest.mark.parametrize("coding", [b"identity", b"gzip", b"chunked, gzip"])
def test_a_coding_without_chunks_ends_with_the_connection(coding: bytes) -> None:
    response = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: " + coding + b"\r\n\r\nhi"
    assert _Received([response], is_closed=True).text == b"hi"


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    found = _Received([b"HTTP/1.1 200 OK\r\n\r\nab", b"c"], is_closed=True)
    assert found.text == b"abc"
    assert not found.idle


@pytest.mark.parametrize(
    "broken",
    [
        CHUNKED[:47] + b"xyz\r\n",
        CHUNKED[:47] + b"1\r\nab\r\n",
        CHUNKED[:47] + b"f" * 20_000,
        BY_LENGTH.replace(b"3", b"-1"),
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
    ],
)
def test_a_broken_response_is_a_fault(broken: bytes) -> None:
    with pytest.raises((ProtocolFault, httpx.RemoteProtocolError), match=r"not valid HTTP/1\.1|another protocol"):
        _Received([broken])


def test_a_head_that_is_too_long_is_a_fault() -> None:
    with pytest.raises(ProtocolFault, match="longer than"):
        _Received([b"HTTP/1.1 200 OK\r\nX: ", *[b"x" * 65_536] * 5])
