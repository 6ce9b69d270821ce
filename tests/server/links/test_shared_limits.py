"""Two fronts of the same engines keep the limits of a tenant together, over real sockets."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Mapping

from tests.server.fake_engine import Script
from tests.server.fleet_parts import Access, FakeHost, FrontParts, until
from tiercel.server.links.fleet_client import FleetClient
from tiercel.server.metrics.registry import ServerMetrics
from tiercel.values.clock import MonotonicClock
from tiercel.values.ids import TenantId
from tiercel.values.limit_use import LimitUse

ACME = TenantId("acme")


class Keeper:
    """Tells one figure, and keeps what it hears."""

    def __init__(self, requests: float) -> None:
        self.requests = requests
        self.heard: list[tuple[bytes, int, Mapping[TenantId, LimitUse]]] = []

    def tell(self) -> dict[TenantId, LimitUse]:
        return {ACME: LimitUse(requests=self.requests)}

    def hear(self, front: bytes, number: int, uses: Mapping[TenantId, LimitUse]) -> None:
        self.heard.append((front, number, uses))


@contextlib.asynccontextmanager
async def front_at(identity: bytes, keeper: Keeper, *ports: int) -> AsyncIterator[FrontParts]:
    """A front with links to these ports."""
    client = FleetClient(MonotonicClock(), ServerMetrics("tiny"), random.Random(2))
    client.limits = keeper
    front = FrontParts(client, Access(identity=identity))
    try:
        for port in ports:
            front.connect(port)
        await until(lambda: all(link.takes_work for link in client.links))
        yield front
    finally:
        client.close()
        for task in front.tasks:
            task.cancel()
        await asyncio.gather(*front.tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def hosts_with_identities(*identities: int) -> AsyncIterator[list[FakeHost]]:
    """Hosts that serve, with these identities."""
    hosts = [FakeHost(Script()) for _ in identities]
    try:
        for host, identity in zip(hosts, identities, strict=True):
            host.identity = bytes([identity]) * 16
            await host.listen()
            await host.start()
        yield hosts
    finally:
        for host in hosts:
            await host.close()


def test_fronts_meet_at_the_two_engines_with_the_least_identities() -> None:
    async def run() -> None:
        ours, theirs = Keeper(3), Keeper(5)
        async with hosts_with_identities(7, 1, 9, 2) as hosts:
            ports = [host.port for host in hosts]
            one = front_at(b"front-identity-1", ours, *ports)
            two = front_at(b"front-identity-2", theirs, ports[3], ports[1])
            async with one as first, two as second:
                first.client.tell_limits()
                await until(lambda: len(theirs.heard) == 2)  # once for each engine
                assert theirs.heard == [(b"front-identity-1", 1, {ACME: LimitUse(requests=3)})] * 2
                assert not ours.heard
                # The way to one of them is lost.
                for front, number in ((first, 1), (second, 1)):
                    front.tasks[number].cancel()
                    link = front.client.links[number]
                    await until(lambda link=link: not link.is_connected)
                second.client.tell_limits()
                await until(lambda: len(ours.heard) == 1)
                assert ours.heard == [(b"front-identity-2", 1, {ACME: LimitUse(requests=5)})]

    asyncio.run(run())


def test_a_front_does_not_hear_itself_by_way_of_two_addresses_of_one_host() -> None:
    async def run() -> None:
        ours, theirs = Keeper(3), Keeper(5)
        async with hosts_with_identities(1) as hosts:
            port = hosts[0].port
            one, two = front_at(b"front-identity-1", ours, port, port), front_at(b"front-identity-2", theirs, port)
            async with one as first, two:
                first.client.tell_limits()
                await until(lambda: len(theirs.heard) == 2)
                first.client.tell_limits()
                await until(lambda: len(theirs.heard) == 4)
                assert not ours.heard

    asyncio.run(run())
