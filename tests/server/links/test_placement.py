"""A front sends a prompt where its prefix is, within the tenant's share, and balances tenants over its engines."""

import asyncio
import random

from tests.server.fake_engine import Script
from tests.server.fleet_parts import Access, FakeHost, FrontParts, fleet_parts, read_tokens, until
from tiercel.server.links.fleet_client import FleetClient
from tiercel.server.links.link import EngineLink, LinkState
from tiercel.server.metrics.registry import ServerMetrics
from tiercel.values.block_key import PromptHeads, namespace_key, prompt_heads
from tiercel.values.clock import MonotonicClock
from tiercel.values.ids import KeyHead, TenantId
from tiercel.values.outcome import FinishReason
from tiercel.values.request import pack_tokens
from tiercel.values.tenant import Tenants, TenantShare
from tiercel.wire.fleet_frames import frame_of, pack_heads
from tiercel.wire.frames import EngineNews

QUICK = Script(max_model_len=4096)
SLOW = Script(max_model_len=4096, step_s=0.005)
PROMPT = tuple(random.Random(5).choices(range(1000), k=1024))


def heads_of(prompt: tuple[int, ...]) -> PromptHeads:
    return prompt_heads(namespace_key(b"", b""), pack_tokens(prompt), QUICK.block_size)


HEADS = heads_of(PROMPT).heads


async def tell(host: FakeHost, link: EngineLink, news: EngineNews) -> None:
    """Have an engine send news, and wait until a front has them."""
    before = link.key_bytes
    host.fake.send(news)
    await until(lambda: link.key_bytes == before + len(news.stored) + len(news.dropped))


async def serve(front: FrontParts, hosts: list[FakeHost], count: int) -> None:
    """Serve one request after the other, and let the engines tell that they have stored nothing of it."""
    for _ in range(count):
        await read_tokens(front.submit(*PROMPT, max_tokens=2))
        for host, link in zip(hosts, front.client.links, strict=True):
            await tell(host, link, EngineNews(stored=pack_heads([KeyHead(1)])))


def submitted(hosts: list[FakeHost]) -> list[int]:
    return [len(host.fake.submitted) for host in hosts]


def test_a_prompt_goes_where_its_prefix_is_until_it_is_dropped() -> None:
    async def run() -> None:
        async with fleet_parts(QUICK, QUICK) as (front, hosts):
            assert len(HEADS) > 3
            await tell(hosts[1], front.client.links[1], EngineNews(stored=pack_heads(HEADS)))
            await serve(front, hosts, 12)
            assert submitted(hosts) == [0, 12]
            await tell(hosts[1], front.client.links[1], EngineNews(dropped=pack_heads(HEADS)))
            await serve(front, hosts, 24)
            assert min(submitted(hosts)) > 2

    asyncio.run(run())


def test_a_computed_prompt_is_found_before_the_engine_tells_of_it_and_not_after_news_without_it() -> None:
    async def run() -> None:
        async with fleet_parts(QUICK, QUICK) as (front, hosts):
            for _ in range(8):
                await read_tokens(front.submit(*PROMPT, max_tokens=2))
            assert sorted(submitted(hosts)) == [0, 8]
            await serve(front, hosts, 24)
            assert min(submitted(hosts)) > 2

    asyncio.run(run())


def test_a_flood_of_one_prefix_spreads() -> None:
    async def run() -> None:
        async with fleet_parts(SLOW, SLOW) as (front, hosts):
            await tell(hosts[1], front.client.links[1], EngineNews(stored=pack_heads(HEADS)))
            for _ in range(150):
                front.submit(*PROMPT, max_tokens=64)
            unfinished = [link.num_unfinished for link in front.client.links]
            assert min(unfinished) > 40
            assert unfinished[1] > unfinished[0]

    asyncio.run(run())


def test_a_front_that_joins_later_hears_of_all_keys_of_the_present_engine() -> None:
    async def run() -> None:
        async with fleet_parts(QUICK, QUICK) as (front, hosts):
            for news in (EngineNews(stored=pack_heads(HEADS)), EngineNews(dropped=pack_heads(HEADS[:2]))):
                await tell(hosts[1], front.client.links[1], news)
            for expected in (len(HEADS) - 2, 0):
                later = FleetClient(MonotonicClock(), ServerMetrics("tiny"), random.Random(1))
                parts = FrontParts(later, Access())
                link = parts.connect(hosts[1].port)
                await until(lambda link=link: link.takes_work)
                await until(lambda link=link, expected=expected: link.key_bytes == 8 * expected)
                later.close()
                for task in parts.tasks:
                    task.cancel()
                await asyncio.gather(*parts.tasks, return_exceptions=True)
                await hosts[1].die()
                await hosts[1].start()

    asyncio.run(run())


def test_the_keys_of_a_dead_engine_are_forgotten() -> None:
    async def run() -> None:
        async with fleet_parts(QUICK, QUICK) as (front, hosts):
            await tell(hosts[1], front.client.links[1], EngineNews(stored=pack_heads(HEADS)))
            await hosts[1].die()
            await until(lambda: not front.client.links[1].takes_work)
            await hosts[1].start()
            await until(lambda: front.client.links[1].takes_work)
            await serve(front, hosts, 24)
            assert min(submitted(hosts)) > 2

    asyncio.run(run())


def test_a_tenant_that_is_bound_to_one_engine_gets_a_greater_weight_there() -> None:
    everywhere, bound = TenantId("everywhere"), TenantId("bound")
    very_slow = Script(max_model_len=4096, step_s=0.5)

    async def run() -> None:
        async with fleet_parts(very_slow, very_slow) as (front, hosts):
            front.client.set_tenants(Tenants(1, (TenantShare(name=everywhere), TenantShare(name=bound))))
            await tell(hosts[1], front.client.links[1], EngineNews(stored=pack_heads(HEADS)))
            for _ in range(8):
                front.submit(*PROMPT, max_tokens=8, tenant=bound)
            assert [link.num_unfinished for link in front.client.links] == [0, 8]
            for number in range(40):
                front.submit(number, max_tokens=8, tenant=everywhere)
            assert min(link.num_unfinished for link in front.client.links) > 8

            def is_raised() -> bool:
                hosts[0].fake.send(EngineNews(served_ms={everywhere: 3.0}))
                hosts[1].fake.send(EngineNews(served_ms={everywhere: 1.5, bound: 1.5}))
                weights = hosts[1].fake.weights
                return len(weights) == 2 and weights[bound] > 2 * weights[everywhere]

            await until(is_raised)
            # With one engine left the weights are those of the file again.
            await hosts[0].die()
            await until(lambda: front.client.links[1].num_unfinished == 48)

            def is_reset() -> bool:
                hosts[1].fake.send(EngineNews(served_ms={everywhere: 1.0}))
                return hosts[1].fake.weights == {everywhere: 1.0, bound: 1.0}

            await until(is_reset)

    asyncio.run(run())


def test_waiting_sequences_move_to_an_engine_that_joins() -> None:
    few = Script(max_model_len=4096, step_s=0.005, max_running=2)

    async def run() -> None:
        async with fleet_parts(few) as (front, hosts):
            mailboxes = [front.submit(number, 7, max_tokens=40) for number in range(20)]
            await until(lambda: len(hosts[0].fake.running) == 2)
            other = FakeHost(few)
            await other.listen()
            await other.start()
            link = front.connect(other.port)
            await until(lambda: link.takes_work and link.num_unfinished > 5)
            async with asyncio.timeout(30):
                assert [await read_tokens(mailbox) for mailbox in mailboxes] == [
                    [number, 7] * 20 for number in range(20)
                ]
            assert not front.client.sequences.num_unfinished
            await other.close()

    asyncio.run(run())


def test_a_sequence_that_moves_while_its_client_leaves_ends_once() -> None:
    few = Script(max_model_len=4096, step_s=0.005, max_running=1)

    async def run() -> None:
        async with fleet_parts(few, few) as (front, hosts):
            for number in range(12):
                front.submit(number, max_tokens=30)
            await until(lambda: all(host.fake.running for host in hosts))
            front.client.abort(list(front.client.sequences.facts_by_seq)[:6], FinishReason.ABORT)
            hosts[0].engine.leave()
            front.client.abort(list(front.client.sequences.facts_by_seq)[6:9], FinishReason.ABORT)
            async with asyncio.timeout(30):
                for number in (9, 10, 11):
                    assert await read_tokens(front.mailboxes[number]) == [number] * 30
            await until(lambda: not front.client.sequences.num_unfinished)
            assert not any(host.fake.live for host in hosts)

    asyncio.run(run())


def test_what_a_draining_engine_has_not_begun_goes_on_elsewhere() -> None:
    few = Script(max_model_len=4096, step_s=0.005, max_running=2)

    async def run() -> None:
        async with fleet_parts(few, few) as (front, hosts):
            mailboxes = [front.submit(number, max_tokens=60) for number in range(16)]
            await until(lambda: all(host.fake.running for host in hosts))
            hosts[0].engine.leave()
            await until(lambda: front.client.links[0].state is LinkState.LEAVING)
            await until(lambda: front.client.links[0].num_unfinished <= 2)
            assert front.client.links[1].num_unfinished >= 12
            async with asyncio.timeout(30):
                assert [await read_tokens(mailbox) for mailbox in mailboxes] == [[n] * 60 for n in range(16)]

    asyncio.run(run())


def test_keys_that_are_no_keys_end_the_connection() -> None:
    async def run() -> None:
        async with fleet_parts(QUICK, QUICK) as (front, hosts):
            (port,) = hosts[0].engine._fronts.values()  # pyright: ignore[reportPrivateUsage]
            port.send(frame_of(EngineNews(stored=b"1234567"), hosts[0].engine.epoch))
            await until(lambda: front.client.links[0].num_deaths == 1)
            await serve(front, hosts, 3)

    asyncio.run(run())
