"""Chunks of responses, written straight into their connections."""

import asyncio
from typing import cast

from tiercel.server.http.body_writer import BodyWriter, WriteBurst, body_writer


class _Transport:
    """A transport that keeps what is written, in one list for all transports of a test."""

    def __init__(self, name: str, written: list[tuple[str, bytes]]) -> None:
        self._name = name
        self._written = written
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self._written.append((self._name, data))

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return sum(len(data) for name, data in self._written if name == self._name)


def _writer(transport: _Transport, burst: WriteBurst) -> BodyWriter:
    return BodyWriter(cast(asyncio.Transport, transport), burst)


def test_the_chunks_of_one_turn_leave_together_after_it_and_in_order() -> None:
    async def test() -> None:
        written: list[tuple[str, bytes]] = []
        burst = WriteBurst()
        one, two = (_writer(_Transport(name, written), burst) for name in ("one", "two"))
        one.write(b"first step ")
        two.write(b"x" * 26)
        one.write(b"second step")
        assert written == []
        await asyncio.sleep(0)
        assert written == [
            ("one", b"16\r\nfirst step second step\r\n"),
            ("two", b"1a\r\n" + b"x" * 26 + b"\r\n"),
        ]
        one.write(b"y")
        await asyncio.sleep(0)
        assert written[2:] == [("one", b"1\r\ny\r\n")]

    asyncio.run(test())


def test_a_flush_sends_at_once_and_nothing_twice() -> None:
    async def test() -> None:
        written: list[tuple[str, bytes]] = []
        writer = _writer(_Transport("one", written), WriteBurst())
        writer.write(b"a")
        writer.flush()
        writer.flush()
        assert written == [("one", b"1\r\na\r\n")]
        await asyncio.sleep(0)
        assert len(written) == 1

    asyncio.run(test())


def test_a_chunk_for_a_client_that_has_gone_is_dropped_and_others_are_sent() -> None:
    async def test() -> None:
        written: list[tuple[str, bytes]] = []
        burst = WriteBurst()
        gone = _Transport("gone", written)
        _writer(gone, burst).write(b"a")
        _writer(_Transport("there", written), burst).write(b"b")
        gone.is_closed = True
        await asyncio.sleep(0)
        assert written == [("there", b"1\r\nb\r\n")]

    asyncio.run(test())


def test_a_scope_of_another_protocol_has_no_writer() -> None:
    assert body_writer({"type": "http"}) is None
    assert body_writer({"type": "http", "extensions": {"http.response.push": {}}}) is None


def test_a_writer_is_full_before_its_transport_knows() -> None:
    async def test() -> None:
        written: list[tuple[str, bytes]] = []
        one = _writer(_Transport("one", written), WriteBurst())
        one.write(b"x" * 40_000)
        assert not one.is_full
        one.flush()
        one.write(b"x" * 20_000)
        assert (one.is_full, one.unsent_bytes > 60_000) == (False, True)
        one.write(b"x" * 10_000)
        assert one.is_full

    asyncio.run(test())
