"""Hostile, slow and broken fronts: none stalls the engine, kills it, or touches what belongs to another front."""

import asyncio
import contextlib
import os
import random
import struct
from array import array
from collections.abc import AsyncIterator
from typing import cast

import pytest
import structlog.testing

from tests.seeds import fresh_seeds
from tests.server.fake_engine import Script
from tests.server.fleet_parts import SECRET, FakeHost, until
from tiercel.server.hosting.front_session import MAX_STRANGERS
from tiercel.server.hosting.split import split_report
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.limit_use import LimitUse
from tiercel.values.outcome import Gauges
from tiercel.values.request import Request, SamplingParams, pack_tokens
from tiercel.wire.fleet_frames import (
    MAX_LIMIT_USES,
    BodyDecoder,
    Framed,
    FrameSplitter,
    HostFrame,
    LimitUses,
    Ping,
    Pong,
    Welcome,
    frame_of,
)
from tiercel.wire.frames import Abort, Ready, Report, Submit
from tiercel.wire.handshake import CHALLENGE_BYTES, VERDICT_BYTES, FrontHandshake

SCRIPT = Script(step_s=0.002, max_model_len=4096)


class RawFront:
    """A front in the hands of a test."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.base = 0
        self.epoch = 0
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, str] = {}
        self._splitter = FrameSplitter()
        self._decoder = BodyDecoder(cast(type[HostFrame], HostFrame))
        self._frames: list[Framed] = []

    @staticmethod
    async def connect(host: FakeHost) -> "RawFront":
        """Connect without a word."""
        return RawFront(*await asyncio.open_connection("127.0.0.1", host.port))

    @staticmethod
    async def join(host: FakeHost) -> "RawFront":
        """Connect, shake hands and wait until the engine is ready."""
        front = await RawFront.connect(host)
        handshake = FrontHandshake(SECRET, b"front-identity-2", os.urandom(16))
        front.writer.write(handshake.answer(await front.reader.readexactly(CHALLENGE_BYTES)))
        handshake.check(await front.reader.readexactly(VERDICT_BYTES))
        welcome = await front.next()
        assert isinstance(welcome, Welcome)
        front.base = welcome.base
        while not isinstance(await front.next(), Ready):
            pass
        return front

    async def next(self) -> HostFrame:
        while not self._frames:
            chunk = await self.reader.read(1 << 16)
            if not chunk:
                raise ConnectionResetError
            self._frames = self._splitter.feed(chunk)
        frame = self._frames.pop(0)
        self.epoch = frame.epoch
        return self._decoder.decode(frame.body)

    def send(self, message: Ping | Submit | Abort | LimitUses) -> None:
        self.writer.write(frame_of(message, self.epoch))

    def submit(self, number: int, *prompt: int, max_tokens: int = 8) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        seq = SeqId(self.base + number)
        self.send(Submit(Request(id=seq, prompt=pack_tokens(prompt), params=params, arrival_s=0.0)))

    async def read(self, *numbers: int) -> None:
        """Read until these sequences have finished."""
        async with asyncio.timeout(20):
            while not self.finished.keys() >= set(numbers):
                message = await self.next()
                if not isinstance(message, Report):
                    continue
                seqs, tokens = memoryview(message.seqs).cast("Q"), memoryview(message.tokens).cast("I")
                for seq, token in zip(seqs, tokens, strict=True):
                    self.tokens.setdefault(seq - self.base, []).append(token)
                self.finished |= {end.seq - self.base: end.reason.value for end in message.finished}

    async def assert_ended(self) -> None:
        """Assert that the host has ended the connection, or does so now."""
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                while await self.reader.read(1 << 16):
                    pass
        self.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    def close(self) -> None:
        self.writer.close()


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[FakeHost, RawFront]]:
    """A host, and an honest front that is served before and after what the test does."""
    host = FakeHost(SCRIPT)
    await host.listen()
    await host.start()
    honest = await RawFront.join(host)
    try:
        honest.submit(1, 5, 6)
        await honest.read(1)
        yield host, honest
        honest.submit(2, 7, 8, 9)
        await honest.read(2)
        assert (honest.tokens[1], honest.tokens[2]) == ([5, 6] * 4, [7, 8, 9, 7, 8, 9, 7, 8])
        assert len(host.fakes) == 1
    finally:
        honest.close()
        await host.close()


def test_fronts_get_their_own_tokens_only() -> None:
    async def run() -> None:
        async with served() as (host, honest):
            other = await RawFront.join(host)
            assert other.base != honest.base
            for number in (11, 12):
                other.submit(number, number, max_tokens=50)
                honest.submit(number, number + 100, max_tokens=50)
            await asyncio.gather(other.read(11, 12), honest.read(11, 12))
            assert other.tokens == {11: [11] * 50, 12: [12] * 50}
            assert {number: honest.tokens[number] for number in (11, 12)} == {11: [111] * 50, 12: [112] * 50}
            other.close()

    asyncio.run(run())


def test_the_end_of_a_front_aborts_its_own_sequences_only() -> None:
    async def run() -> None:
        async with served() as (host, honest):
            other = await RawFront.join(host)
            other.submit(11, 1, max_tokens=4000)
            honest.submit(11, 2, max_tokens=200)
            await until(lambda: host.fake.live == 2)
            other.close()
            await until(lambda: bool(host.fake.aborted))
            assert [seq for seq, _ in host.fake.aborted] == [other.base + 11]
            await honest.read(11)
            assert honest.tokens[11] == [2] * 200
            assert host.engine.num_open == 0

    asyncio.run(run())


@pytest.mark.parametrize("seed", [1, *fresh_seeds(1)])
def test_garbage_is_refused(seed: int) -> None:
    async def run() -> None:
        rng = random.Random(seed)
        async with served() as (host, _):
            for _ in range(20):
                stranger = await RawFront.connect(host)
                stranger.writer.write(rng.randbytes(rng.choice([1, 83, 84, 200, 100_000])))
                stranger.writer.write_eof()
                await stranger.assert_ended()
                stranger.close()
            await until(lambda: host.num_strangers == 0)

    asyncio.run(run())


def test_a_wrong_secret_and_a_replayed_hello_are_refused() -> None:
    async def run() -> None:
        async with served() as (host, _):
            first = await RawFront.connect(host)
            hello = FrontHandshake(SECRET, b"front-identity-3", os.urandom(16)).answer(
                await first.reader.readexactly(CHALLENGE_BYTES)
            )
            first.writer.write(hello)
            accepted = await first.reader.readexactly(VERDICT_BYTES)
            assert accepted[12] == 0
            wrong = FrontHandshake(b"x" * 32, b"front-identity-3", os.urandom(16))
            for answer in (lambda _: hello, wrong.answer):
                second = await RawFront.connect(host)
                second.writer.write(answer(await second.reader.readexactly(CHALLENGE_BYTES)))
                assert (await second.reader.readexactly(VERDICT_BYTES))[12] == 2
                await second.assert_ended()
            assert host.engine.num_fronts == 2
            first.close()

    asyncio.run(run())


def test_strangers_who_say_nothing_are_limited_and_keep_nobody_out_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercel.server.hosting.front_session.HELLO_S", 0.3)

    async def run() -> None:
        async with served() as (host, _):
            strangers = [await RawFront.connect(host) for _ in range(MAX_STRANGERS)]
            await until(lambda: host.num_strangers == MAX_STRANGERS)
            await (await RawFront.connect(host)).assert_ended()
            for stranger in strangers:
                await stranger.assert_ended()
            assert host.num_strangers == 0
            late = await RawFront.join(host)
            late.submit(1, 3)
            await late.read(1)
            late.close()

    with structlog.testing.capture_logs() as logs:
        asyncio.run(run())
    assert len([line for line in logs if line["event"] == "connections_refused"]) == 1  # not one for each


def offence(name: str, front: RawFront) -> bytes:
    """Return the bytes of an offence."""
    params = SamplingParams(max_tokens=4)

    def submit(prompt: bytes, seq: int = front.base + 77) -> bytes:
        return frame_of(Submit(Request(id=SeqId(seq), prompt=prompt, params=params, arrival_s=0.0)), front.epoch)

    match name:
        case "oversize":
            return struct.pack("<II", 1 << 31, front.epoch)
        case "no message":
            return struct.pack("<II", 4, front.epoch) + b"\xc1\xc1\xc1\xc1"
        case "foreign id":
            return submit(pack_tokens([1]), 77)
        case "foreign abort":
            return frame_of(Abort((SeqId(front.base + 1), SeqId((1 << 44) + 1))), front.epoch)
        case "token beyond the vocabulary":
            return submit(pack_tokens([1, 1 << 20]))
        case "half a token":
            return submit(b"\x01\0\0\0\x01")
        case "prompt beyond the context":
            return submit(pack_tokens([1] * 5000))
        case "same id":
            return submit(pack_tokens([1])) * 2
        case _:
            raise ValueError(name)


OFFENCES = (
    *("oversize", "no message", "foreign id", "foreign abort"),
    *("token beyond the vocabulary", "half a token", "prompt beyond the context", "same id"),
)


@pytest.mark.parametrize("name", OFFENCES)
def test_a_front_that_breaks_a_rule_is_disconnected(name: str) -> None:
    async def run() -> None:
        async with served() as (host, honest):
            honest.submit(11, 2, max_tokens=300)
            hostile = await RawFront.join(host)
            hostile.writer.write(offence(name, hostile))
            await hostile.assert_ended()
            await honest.read(11)
            assert honest.tokens[11] == [2] * 300
            assert not [seq for seq, _ in host.fake.aborted if seq >> 44 == honest.base >> 44]
            await until(lambda: host.engine.num_fronts == 1)

    asyncio.run(run())


def test_half_a_frame_keeps_nobody_waiting() -> None:
    async def run() -> None:
        async with served() as (host, honest):
            slow = await RawFront.join(host)
            slow.writer.write(struct.pack("<II", 1000, slow.epoch) + b"x" * 10)
            await slow.writer.drain()
            honest.submit(11, 2, max_tokens=50)
            await honest.read(11)
            assert host.engine.num_fronts == 2
            slow.close()

    asyncio.run(run())


def test_a_front_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercel.server.hosting.front_session.MAX_UNSENT_BYTES", 1 << 16)

    async def run() -> None:
        async with served() as (host, honest):
            deaf = await RawFront.join(host)
            deaf.writer.transport.pause_reading()  # type: ignore[attr-defined]
            (port,) = [front for number, front in host.engine._fronts.items() if number << 44 == deaf.base]  # pyright: ignore[reportPrivateUsage]
            deaf.submit(11, 3, max_tokens=4000)
            await until(lambda: host.fake.live == 1)
            report = frame_of(Report(tokens=bytes(1 << 16)), host.engine.epoch)
            for _ in range(400):
                port.send(report)
            await until(lambda: host.engine.num_fronts == 1)
            honest.submit(11, 2, max_tokens=50)
            await honest.read(11)
            await until(lambda: host.engine.num_open == 0)
            deaf.writer.transport.abort()

    asyncio.run(run())


def test_a_silent_front_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercel.server.hosting.front_session.FRONT_SILENCE_S", 0.2)
    monkeypatch.setattr("tiercel.server.hosting.front_session._CHECK_S", 0.05)

    async def run() -> None:
        host = FakeHost(SCRIPT)
        await host.listen()
        await host.start()
        silent = await RawFront.join(host)
        silent.submit(1, 3, max_tokens=4000)
        await silent.assert_ended()
        await until(lambda: bool(host.fake.aborted))
        await host.close()

    asyncio.run(run())


def test_what_was_meant_for_a_dead_engine_does_not_reach_the_next() -> None:
    async def run() -> None:
        host = FakeHost(SCRIPT)
        await host.listen()
        await host.start()
        front = await RawFront.join(host)
        await host.die()
        await host.start()
        await until(lambda: host.engine.status.state.value == "ready")
        front.submit(1, 3)  # under the first epoch
        front.epoch = 2
        front.submit(2, 4)
        await front.read(2)
        assert [request.id - front.base for request in host.fake.submitted] == [2]
        front.close()
        await host.close()

    asyncio.run(run())


def test_a_ping_is_answered_whatever_the_engine_does() -> None:
    async def run() -> None:
        host = FakeHost(Script(hang_at_step=0))
        await host.listen()
        await host.start()
        front = await RawFront.join(host)
        front.submit(1, 3)
        front.send(Ping(1.5))
        async with asyncio.timeout(10):
            pong = await front.next()
        assert isinstance(pong, Pong)
        assert pong.sent_s == 1.5
        front.close()
        await host.close()

    asyncio.run(run())


def test_reports_of_several_fronts_are_split() -> None:
    report = Report(
        seqs=array("Q", [(1 << 44) + 1, (2 << 44) + 1, (1 << 44) + 2]).tobytes(),
        tokens=array("I", [10, 20, 30]).tobytes(),
        gauges=Gauges(num_running=3),
    )
    parts = split_report(report, [1, 2, 3])
    assert list(memoryview(parts[1].tokens).cast("I")) == [10, 30]
    assert list(memoryview(parts[2].tokens).cast("I")) == [20]
    assert parts[3] == Report(gauges=Gauges(num_running=3))
    assert split_report(Report(seqs=report.seqs, tokens=report.tokens), [3]) == {}


def test_a_front_hears_what_the_others_have_allowed_and_never_its_own() -> None:
    async def run() -> None:
        async with served() as (host, honest):
            other = await RawFront.join(host)
            uses = {TenantId("acme"): LimitUse(requests=3, num_open=2)}
            other.send(LimitUses(uses, 5, front=b"somebody else"))
            other.send(Ping(0.0))
            async with asyncio.timeout(20):
                while not isinstance(heard := await honest.next(), LimitUses):
                    pass
                while not isinstance(answer := await other.next(), Pong):
                    assert not isinstance(answer, LimitUses)
            assert heard == LimitUses(uses, 5, front=b"front-identity-2")
            other.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "use",
    [
        LimitUse(requests=float("nan")),
        LimitUse(tokens=float("inf")),
        LimitUse(asked=-1),
        LimitUse(num_open=-1),
        LimitUse(num_reserved=1 << 60),
        LimitUse(requests_left=float("-inf")),
        LimitUse(tokens_left=1e300),
    ],
)
def test_a_front_that_tells_nonsense_of_its_limits_is_disconnected(use: LimitUse) -> None:
    async def run() -> None:
        async with served() as (host, _):
            hostile = await RawFront.join(host)
            hostile.send(LimitUses({TenantId("acme"): use}, 1))
            await hostile.assert_ended()

    asyncio.run(run())


def test_a_front_that_tells_of_more_tenants_than_there_may_be_is_disconnected() -> None:
    async def run() -> None:
        async with served() as (host, _):
            hostile = await RawFront.join(host)
            hostile.send(LimitUses({TenantId(str(number)): LimitUse() for number in range(MAX_LIMIT_USES + 1)}, 1))
            await hostile.assert_ended()

    asyncio.run(run())
