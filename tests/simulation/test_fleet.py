"""Simulated fleets: every request ends, the seed decides all, and the front's parts do what they are for."""

import random

import pytest
from msgspec.structs import replace

from benchmarks.scenarios.replicas import ENGINE, run_bound, run_saturated_fleet
from tests.seeds import fresh_seeds
from tiercel.ids import EngineId, TenantId
from tiercel.simulation.fleet import FleetSimSettings, FleetSimulation, Placement
from tiercel.simulation.workload import Lengths, PromptPart, SimRequest, Sources, draw_requests
from tiercel.tenant import TenantShare

A, B = TenantId("a"), TenantId("b")


def played(replicas: int, seed: int, placement: Placement = "router") -> FleetSimulation:
    rng, sources = random.Random(seed), Sources()
    shares = [TenantShare(name=A), TenantShare(name=B, weight=2.0)]
    settings = FleetSimSettings(
        replicas=replicas, engine=replace(ENGINE, seed=seed, noise=0.1, blocks=128), placement=placement
    )
    fleet = FleetSimulation(settings, shares)
    lengths = Lengths(input_len=200, output_len=20, sigma=0.5, prefix_len=256, num_prefixes=4)
    for share in shares:
        for request in draw_requests(share, [rng.uniform(0, 4) for _ in range(40)], lengths, rng, sources):
            fleet.send(request)
    fleet.run()
    return fleet


@pytest.mark.parametrize("seed", [0, *fresh_seeds(1)])
@pytest.mark.parametrize("placement", ["router", "in_turn", "at_random"])
def test_every_request_ends_once_and_leaves_nothing_in_the_books(seed: int, placement: Placement) -> None:
    fleet = played(3, seed, placement)
    assert sum(engine.tally.finished for engine in fleet.engines) == 80
    assert fleet.num_unfinished == fleet.router.num_underway == 0
    assert all(fleet.router.work_ms(EngineId(number)) == 0 for number in range(3))
    fleet.moves.check_integrity()
    fleet.router.index.check_integrity()


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = played(3, 7), played(3, 7)
    assert first.now_s == second.now_s
    assert [one.tally.tokens for one in first.engines] == [one.tally.tokens for one in second.engines]
    assert first.served_ms() == second.served_ms()


def test_a_bound_tenant_goes_to_its_engine_only() -> None:
    settings = FleetSimSettings(replicas=3, engine=ENGINE, engine_by_tenant={B: 2})
    fleet = FleetSimulation(settings, [TenantShare(name=A), TenantShare(name=B)])
    for number in range(30):
        tenant = (A, B)[number % 2]
        fleet.send(SimRequest(0.01 * number, tenant, (PromptPart(number + 1, 64),), 8))
    fleet.run()
    submitted = [engine.tally.by_tenant[B].submitted for engine in fleet.engines]
    assert submitted == [0, 0, 15]
    assert all(engine.tally.by_tenant[A].submitted for engine in fleet.engines)


def test_a_bound_tenant_gets_its_share_with_weights_of_the_account_and_not_without() -> None:
    found, without = run_bound(4), run_bound(4, has_weights=False)
    assert found.least_part >= 0.9
    assert found.jain >= 0.99
    assert without.least_part < 0.9
    assert without.jain < 0.99


@pytest.mark.slow
def test_a_saturated_fleet_is_balanced_and_a_random_choice_is_not() -> None:
    one = run_saturated_fleet(1, seconds=15.0, begin_s=5.0).tokens_per_s
    assert run_saturated_fleet(8, seconds=15.0, begin_s=5.0).tokens_per_s >= 0.97 * 8 * one
    random_part = run_saturated_fleet(8, placement="at_random", seconds=15.0, begin_s=5.0).tokens_per_s / (8 * one)
    assert random_part < 0.97
