"""Two fronts of the same engines keep the limits of a tenant together, over real sockets."""

import asyncio
import random
from collections.abc import Mapping

from tests.server.fake_engine import Script
from tests.server.fleet_parts import Access, FakeHost, FrontParts, fleet_parts, until
from tiercel.clock import MonotonicClock
from tiercel.ids import TenantId
from tiercel.limit_use import LimitUse
from tiercel.server.metrics.registry import ServerMetrics
from tiercel.server.remote.fleet_client import FleetClient

ACME = TenantId("acme")


class Keeper:
    """Tells one figure, and keeps what it hears."""

    def __init__(self, requests: float) -> None:
        self.requests = requests
        self.heard: list[tuple[bytes, Mapping[TenantId, LimitUse]]] = []

    def tell(self) -> dict[TenantId, LimitUse]:
        return {ACME: LimitUse(requests=self.requests)}

    def hear(self, front: bytes, uses: Mapping[TenantId, LimitUse]) -> None:
        self.heard.append((front, uses))


async def second_front(hosts: list[FakeHost]) -> FrontParts:
    client = FleetClient(MonotonicClock(), ServerMetrics("tiny"), random.Random(2))
    front = FrontParts(client, Access(identity=b"front-identity-9"))
    for host in hosts:
        front.connect(host.port)
    await until(lambda: all(link.takes_work for link in client.links))
    return front


def test_fronts_hear_each_other_over_two_of_their_engines_and_when_one_is_lost() -> None:
    async def run() -> None:
        async with fleet_parts(*[Script()] * 3) as (first, hosts):
            for number, host in enumerate(hosts):
                host.identity = bytes([9 - number]) * 16
            for task in first.tasks:
                task.cancel()
            first.client.close()
            fronts = [await second_front(hosts), await second_front(hosts)]
            fronts[1].access.identity = b"front-identity-8"
            ours, theirs = Keeper(3), Keeper(5)
            fronts[0].client.limits, fronts[1].client.limits = ours, theirs
            fronts[0].client.tell_limits()
            await until(lambda: len(theirs.heard) == 2)  # once for each of two engines
            assert theirs.heard == [(b"front-identity-9", {ACME: LimitUse(requests=3)})] * 2
            assert not ours.heard
            # The engines with the least identities are those of the last hosts: the way to one of them is lost.
            for front in fronts:
                front.tasks[2].cancel()
                await until(lambda front=front: sum(link.is_connected for link in front.client.links) == 2)
            fronts[1].client.tell_limits()
            await until(lambda: len(ours.heard) == 2)
            for front in fronts:
                front.client.close()
                for task in front.tasks:
                    task.cancel()
                await asyncio.gather(*front.tasks, return_exceptions=True)

    asyncio.run(run())
