"""Sending to a client that reads slowly, or not at all."""

import asyncio

import pytest
from starlette.types import Message

from tiercel.server.http.patience import PatientSender
from tiercel.server.http.watch import SlowReaderError

PATIENCE_S = 0.2


class Connection:
    """A connection that takes `steps` bytes, one every quarter of the patience, before a message is sent."""

    def __init__(self, steps: int, *, is_stuck: bool = False) -> None:
        self.unsent = steps
        self.sent = 0
        self._is_stuck = is_stuck

    async def send(self, _message: Message) -> None:
        while self.unsent:
            await asyncio.sleep(PATIENCE_S / 4)
            self.unsent -= not self._is_stuck
        self.sent += 1


def test_a_client_that_reads_slowly_but_steadily_is_waited_for() -> None:
    async def test() -> None:
        connection = Connection(20)  # five times the patience
        await PatientSender(connection.send, lambda: connection.unsent, PATIENCE_S)({})
        assert connection.sent == 1

    asyncio.run(test())


def test_a_client_that_takes_nothing_is_a_slow_reader() -> None:
    async def test() -> None:
        connection = Connection(20, is_stuck=True)
        with pytest.raises(SlowReaderError):
            await PatientSender(connection.send, lambda: connection.unsent, PATIENCE_S)({})
        assert connection.sent == 0

    asyncio.run(test())


def test_without_the_number_of_unsent_bytes_each_message_has_the_patience() -> None:
    async def test() -> None:
        sender = PatientSender(Connection(2).send, None, PATIENCE_S)
        await sender({})
        with pytest.raises(SlowReaderError):
            await PatientSender(Connection(20).send, None, PATIENCE_S)({})

    asyncio.run(test())
