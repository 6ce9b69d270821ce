"""The sums of the gauges of several engines."""

import random

from tests.server.fleet_parts import Access
from tiercel.server.links.fleet_client import FleetClient
from tiercel.server.links.gauges import FleetGauges
from tiercel.server.links.link import EngineLink
from tiercel.server.metrics.registry import ServerMetrics
from tiercel.values.clock import ManualClock
from tiercel.values.ids import TenantId
from tiercel.values.outcome import DiskState, FairGauges, Gauges, RouteGauges, TenantBlocks, TenantGauges, TierGauges
from tiercel.values.tier import Route, Tier

A, B = TenantId("a"), TenantId("b")


def two_links() -> list[EngineLink]:
    clock = ManualClock()
    owner = FleetClient(clock, ServerMetrics("tiny"), random.Random(1))
    return [EngineLink("127.0.0.1", port, "", Access(), owner, clock) for port in (1, 2)]


def gauges(steps: int, tenant: TenantId, jain: float) -> Gauges:
    tier = TierGauges(
        tier=Tier.HBM,
        block_bytes=64,
        blocks_total=10,
        blocks_used=3,
        hit_tokens=5,
        tenants=(TenantBlocks(tenant, 2, 1),),
    )
    return Gauges(
        num_running=2,
        blocks_total=10,
        steps=steps,
        step_tokens=7,
        tiers=(tier,),
        routes=(RouteGauges(route=Route.SPILL, bytes=100),),
        disk_state=DiskState.ON if steps > 1 else DiskState.READ_ONLY,
        fair=FairGauges(competing=2, jain=jain, gap_s=1 - jain, tenants=(TenantGauges(tenant=tenant, service_s=2.0),)),
        preemptions_by_reason={"growth": 1},
    )


def test_numbers_add_up_and_the_worst_state_counts() -> None:
    links, fleet = two_links(), FleetGauges()
    fleet.take(links[0], gauges(1, A, 0.9), links)
    total = fleet.take(links[1], gauges(4, A, 0.8), links)
    assert (total.steps, total.num_running, total.blocks_total, total.step_tokens) == (5, 4, 20, 7)
    (tier,) = total.tiers
    assert (tier.block_bytes, tier.blocks_total, tier.hit_tokens) == (64, 20, 10)
    assert tier.tenants == (TenantBlocks(A, 4, 2),)
    assert total.routes[0].bytes == 200
    assert total.disk_state is DiskState.READ_ONLY
    assert total.preemptions_by_reason == {"growth": 2}
    assert total.fair is not None
    assert (total.fair.jain, total.fair.tenants[0].service_s) == (0.8, 4.0)


def test_a_report_without_details_keeps_those_of_before() -> None:
    links, fleet = two_links(), FleetGauges()
    fleet.take(links[0], gauges(1, A, 0.9), links)
    total = fleet.take(links[1], Gauges(steps=2, num_running=1), links)
    assert (total.steps, total.num_running, total.step_tokens) == (3, 3, 0)
    assert total.tiers[0].blocks_total == 10
    assert total.fair is not None


def test_counters_of_a_lost_engine_stay_in_the_sum() -> None:
    links, fleet = two_links(), FleetGauges()
    fleet.take(links[0], gauges(5, A, 0.9), links)
    fleet.take(links[1], gauges(4, B, 0.8), links)
    fleet.retire(links[0])
    total = fleet.take(links[1], gauges(6, B, 0.8), links)
    assert (total.steps, total.num_running, total.blocks_total) == (11, 2, 10)
