"""The sequences of a front go on at another engine, each token once, however an engine is lost."""

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator

import pytest
import structlog.testing

from tests.e2e.fleet import Partition
from tests.server.fake_engine import Script
from tests.server.fleet_parts import FrontParts, fleet_parts, read_end, read_tokens, until
from tiercel.server.client.crash_book import DeathKind
from tiercel.server.client.status import EngineState
from tiercel.server.links.link import LinkState
from tiercel.values.ids import SeqId
from tiercel.values.outcome import FinishReason
from tiercel.values.tenant import Tenants
from tiercel.wire.fleet_frames import frame_body, frame_of
from tiercel.wire.frames import Report
from tiercel.wire.step_record import EngineTrail

SLOW = Script(step_s=0.005, max_model_len=4096)
PROMPTS = [(5, 6, 7), (8, 9), (10,), (11, 12, 13, 14)]


def repeated(prompt: tuple[int, ...], count: int) -> list[int]:
    return [prompt[index % len(prompt)] for index in range(count)]


def submit_all(front: FrontParts, max_tokens: int) -> None:
    for prompt in PROMPTS:
        front.submit(*prompt, max_tokens=max_tokens)


async def assert_whole(front: FrontParts, max_tokens: int) -> None:
    async with asyncio.timeout(30):
        found = [await read_tokens(mailbox) for mailbox in front.mailboxes]
    assert found == [repeated(prompt, max_tokens) for prompt in PROMPTS]
    assert not front.client.sequences.num_unfinished
    assert not any(link.seqs for link in front.client.links)
    moves = front.client._moves  # pyright: ignore[reportPrivateUsage]
    moves.check_integrity()
    assert not moves.unplaced
    assert not moves.router.num_underway


def outputs(front: FrontParts) -> list[int]:
    return [facts.num_outputs for facts in front.client.sequences.facts_by_seq.values()]


def test_sequences_are_spread_and_reported_once() -> None:
    async def run() -> None:
        async with fleet_parts(SLOW, SLOW) as (front, hosts):
            submit_all(front, 20)
            assert [link.num_unfinished for link in front.client.links] == [2, 2]
            await assert_whole(front, 20)
            assert [len(host.fake.submitted) for host in hosts] == [2, 2]

    asyncio.run(run())


def test_tenants_reach_every_engine() -> None:
    async def run() -> None:
        async with fleet_parts(SLOW, SLOW) as (front, hosts):
            front.client.set_tenants(Tenants(3, ()))
            await until(lambda: all(host.fake.tenants for host in hosts))
            await hosts[0].die()
            await hosts[0].start()
            await until(lambda: bool(hosts[0].fake.tenants))
            assert hosts[0].fake.tenants[-1].tenants == ()

    asyncio.run(run())


@pytest.mark.parametrize("kind", [DeathKind.SIGNAL, DeathKind.HANG])
def test_the_sequences_of_a_dead_engine_go_on_elsewhere_with_their_outputs(kind: DeathKind) -> None:
    async def run() -> None:
        async with fleet_parts(SLOW, SLOW) as (front, hosts):
            submit_all(front, 60)
            await until(lambda: min(outputs(front)) > 5)
            await hosts[0].die(kind)
            await until(lambda: len(hosts[1].fake.submitted) == 4)
            assert all(len(request.outputs) > 5 * 4 for request in hosts[1].fake.submitted[2:])
            assert front.client.status.state is EngineState.READY
            await assert_whole(front, 60)

    asyncio.run(run())


def test_an_engine_that_returns_is_used_under_a_new_epoch() -> None:
    async def run() -> None:
        async with fleet_parts(SLOW) as (front, hosts):
            submit_all(front, 60)
            for epoch in (2, 3):
                await until(lambda: min(outputs(front)) > 5)
                await hosts[0].die()
                assert front.client.status.state in (EngineState.READY, EngineState.RESTARTING)
                await hosts[0].start()
                assert hosts[0].engine.epoch == epoch
                await until(lambda: front.client.links[0].takes_work and len(hosts[0].fake.submitted) == 4)
            await assert_whole(front, 60)
            assert front.client.links[0].num_deaths == 2

    asyncio.run(run())


def test_late_frames_of_a_dead_engine_are_dropped() -> None:
    """A host that sends what a dead engine had computed, between its death and long after, adds no token."""

    async def run() -> None:
        async with fleet_parts(SLOW, SLOW) as (front, hosts):
            submit_all(front, 60)
            await until(lambda: min(outputs(front)) > 5)
            host = hosts[0]
            (port,) = host.engine._fronts.values()  # pyright: ignore[reportPrivateUsage]
            moved = [SeqId(seq) for seq in front.client.links[0].seqs]
            base = port.number << 44
            late = Report(
                seqs=array("Q", [seq + base for seq in moved]).tobytes(), tokens=array("I", [999] * 2).tobytes()
            )
            await host.die()
            port.send(frame_of(late, 1))
            await host.start()
            await until(lambda: front.client.links[0].takes_work)
            port.send(frame_of(late, 1))
            port.send(frame_body(b"\x81\xa4type\xa5never", 1))  # no message at all
            await assert_whole(front, 60)
            assert front.client.links[0].num_late_frames == 2

    asyncio.run(run())


def test_a_report_of_an_engine_about_a_sequence_elsewhere_adds_nothing() -> None:
    async def run() -> None:
        async with fleet_parts(SLOW, SLOW) as (front, hosts):
            submit_all(front, 40)
            await until(lambda: min(outputs(front)) > 5)
            (port,) = hosts[0].engine._fronts.values()  # pyright: ignore[reportPrivateUsage]
            others = [seq + (port.number << 44) for seq in front.client.links[1].seqs]
            report = Report(seqs=array("Q", others).tobytes(), tokens=array("I", [999] * len(others)).tobytes())
            port.send(frame_of(report, hosts[0].engine.epoch))
            await assert_whole(front, 40)

    asyncio.run(run())


@contextlib.asynccontextmanager
async def parted_fleet(heartbeat_s: float) -> AsyncIterator[tuple[FrontParts, Partition]]:
    """A front with two engines, the second one behind a proxy."""
    async with (
        fleet_parts(SLOW, SLOW, heartbeat_s=heartbeat_s) as (front, hosts),
        Partition(f"127.0.0.1:{hosts[1].port}").running() as proxy,
    ):
        front.tasks.pop().cancel()
        front.client.remove(front.client.links[1])
        front.connect(int(proxy.address.rpartition(":")[2]))
        await until(lambda: front.client.links[1].takes_work)
        yield front, proxy


def test_a_partition_moves_the_sequences_and_its_end_brings_the_engine_back() -> None:
    async def run() -> None:
        async with parted_fleet(0.4) as (front, proxy):
            submit_all(front, 200)
            await until(lambda: min(outputs(front)) > 5)
            proxy.part()
            await until(lambda: not front.client.links[1].takes_work)
            assert not front.client.links[1].seqs
            proxy.heal()
            await assert_whole(front, 200)
            await until(lambda: front.client.links[1].takes_work)

    asyncio.run(run())


def test_without_an_engine_sequences_are_held_then_refused_then_served_again() -> None:
    async def run() -> None:
        async with fleet_parts(SLOW, hold_s=0.3) as (front, hosts):
            held = front.submit(1, 2, max_tokens=500)
            await until(lambda: min(outputs(front)) > 3)
            await hosts[0].die()
            await until(lambda: front.client.status.state is EngineState.RESTARTING)
            also_held = front.submit(3, 4)
            ends = [await read_end(mailbox) for mailbox in (held, also_held)]
            assert [(end.status, end.code) for end in ends] == [(503, "engine_dead")] * 2
            refused = front.submit(5, 6)
            assert (await read_end(refused)).retry_after_s is not None
            assert not front.client.sequences.num_unfinished
            await hosts[0].start()
            await until(lambda: front.client.status.state is EngineState.READY)
            assert await read_tokens(front.submit(7, 8, max_tokens=4)) == [7, 8, 7, 8]

    asyncio.run(run())


def test_a_held_sequence_goes_on_when_an_engine_comes_in_time() -> None:
    async def run() -> None:
        async with fleet_parts(SLOW) as (front, hosts):
            submit_all(front, 40)
            await until(lambda: min(outputs(front)) > 3)
            await hosts[0].die()
            await until(lambda: front.client.status.state is EngineState.RESTARTING)
            gone = front.client.submit([front.client.sequences.facts_by_seq[SeqId(1)].start], front.mailboxes[0], 0.0)
            front.client.abort(gone.seqs, FinishReason.ABORT)
            assert front.client.sequences.num_unfinished == 4
            await hosts[0].start()
            await assert_whole(front, 40)

    asyncio.run(run())


def test_a_sequence_that_crashes_engines_is_failed_by_the_second_and_no_other() -> None:
    """The first death makes it a suspect, which runs alone; the second one, of another engine, is its own."""

    async def run() -> None:
        async with fleet_parts(SLOW, SLOW) as (front, hosts):
            submit_all(front, 300)
            await until(lambda: min(outputs(front)) > 3)
            seq = next(iter(front.client.links[0].seqs))
            base = 1 << 44
            await hosts[0].die(trail=EngineTrail(None, {SeqId(base + seq): 9}))
            await until(lambda: len(hosts[1].fake.submitted) == 4)
            moved = {request.id - base: request.suspect_until for request in hosts[1].fake.submitted[2:]}
            assert moved[seq] == 9
            assert [until for other, until in moved.items() if other != seq] == [0]
            facts = front.client.sequences.facts_by_seq[seq]
            moved_at = facts.num_outputs
            await hosts[0].start()
            await until(lambda: front.client.links[0].takes_work and facts.num_outputs > moved_at)
            facts.suspect_until = 9  # as if it had not passed its step
            await hosts[1].die(trail=EngineTrail(None, {SeqId(base + seq): 9}))
            end = await read_end(front.mailboxes[seq - 1])
            assert (end.status, end.code) == (500, "engine_crashed")
            others = [mailbox for number, mailbox in enumerate(front.mailboxes, 1) if number != seq]
            prompts = [prompt for number, prompt in enumerate(PROMPTS, 1) if number != seq]
            assert [await read_tokens(mailbox) for mailbox in others] == [repeated(one, 300) for one in prompts]

    asyncio.run(run())


def test_an_engine_that_serves_something_else_is_refused() -> None:
    async def run() -> None:
        async with fleet_parts(SLOW) as (front, hosts):
            other = type(hosts[0])(Script(max_model_len=128))
            await other.listen()
            await other.start()
            link = front.connect(other.port)
            await until(lambda: link.state is LinkState.REFUSED)
            assert "max_model_len is 128, that of the engines in use is 4096" in link.problem
            assert await read_tokens(front.submit(1, max_tokens=2)) == [1, 1]
            assert not other.fake.submitted
            await other.close()

    asyncio.run(run())


def test_a_refused_engine_is_used_once_nothing_of_the_others_is_left() -> None:
    async def run() -> None:
        async with fleet_parts(SLOW, hold_s=0.2) as (front, hosts):
            other = type(hosts[0])(Script(max_model_len=128))
            await other.listen()
            await other.start()
            link = front.connect(other.port)
            await until(lambda: link.state is LinkState.REFUSED)
            await hosts[0].die()
            await until(lambda: link.takes_work)
            assert await read_tokens(front.submit(1, max_tokens=2)) == [1, 1]
            assert front.client.status.ready is not None
            assert front.client.status.ready.max_model_len == 128
            await other.close()

    asyncio.run(run())


def test_a_wrong_secret_is_reported_and_never_served() -> None:
    async def run() -> None:
        async with fleet_parts(SLOW) as (front, hosts):
            front.access.secret = b"another secret, also long enough"
            link = front.connect(hosts[0].port)
            await until(lambda: bool(link.problem))
            assert "--engine-secret-file" in link.problem
            assert link.state is LinkState.CONNECTING

    asyncio.run(run())


def test_a_connection_that_is_lost_while_its_engine_loads_leaves_a_line() -> None:
    async def run() -> None:
        async with fleet_parts(SLOW) as (front, hosts):
            link = front.client.links[0]
            session = link._session  # pyright: ignore[reportPrivateUsage] - what a broken host would send to it
            assert session is not None
            link.state = LinkState.LOADING
            session.data_received(b"\xff" * 64)
            assert not link.is_connected and "wire.too_large" in link.problem
            assert len(hosts) == 1

    with structlog.testing.capture_logs() as logs:
        asyncio.run(run())
    assert [line["problem"][:14] for line in logs if line["event"] == "engine_unreachable"] == ["wire.too_large"]


def test_a_leaving_engine_ends_what_it_has_and_gets_nothing_new() -> None:
    async def run() -> None:
        async with fleet_parts(SLOW, SLOW) as (front, hosts):
            submit_all(front, 60)
            await until(lambda: min(outputs(front)) > 3)
            hosts[0].engine.leave()
            await until(lambda: front.client.links[0].state is LinkState.LEAVING)
            front.submit(*PROMPTS[0], max_tokens=60)
            assert len(front.client.links[1].seqs) == 3
            del front.mailboxes[-1]
            async with asyncio.timeout(30):
                found = [await read_tokens(mailbox) for mailbox in front.mailboxes]
            assert found == [repeated(prompt, 60) for prompt in PROMPTS]
            assert len(hosts[0].fake.submitted) == 2

    asyncio.run(run())
