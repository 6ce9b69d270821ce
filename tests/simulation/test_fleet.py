"""Simulated fleets: every request ends, the seed decides all, and the front's parts do what they are for."""

import random

import pytest
from msgspec.structs import replace

from benchmarks.scenarios.replicas import ENGINE, run_bound, run_saturated_fleet
from tests.seeds import fresh_seeds
from tiercel.simulation.fleet import FleetSimSettings, FleetSimulation, Placement
from tiercel.simulation.http import HttpTimes
from tiercel.simulation.replay import FleetReplay, Replay
from tiercel.simulation.result import figures
from tiercel.simulation.workload import (
    Lengths,
    PromptPart,
    SimRequest,
    Sources,
    Workload,
    draw_requests,
    ordered_workload,
)
from tiercel.values.ids import EngineId, TenantId
from tiercel.values.tenant import TenantShare

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
@pytest.mark.sampled(3)
def test_every_request_ends_once_and_leaves_nothing_in_the_books(seed: int, placement: Placement) -> None:
    fleet = played(3, seed, placement)
    assert sum(engine.tally.finished for engine in fleet.engines) == 80
    assert fleet.num_unfinished == fleet.router.num_underway == 0
    assert all(fleet.router.work_ms(EngineId(number)) == 0 for number in range(3))
    fleet.moves.check_integrity()
    fleet.router.index.check_integrity()


def crowd(rate: float, seed: int = 0) -> Workload:
    rng = random.Random(seed)
    lengths = Lengths(input_len=200, output_len=20, sigma=0.5)
    shares = [TenantShare(name=A), TenantShare(name=B)]
    requests: list[SimRequest] = []
    sources = Sources()
    for share in shares:
        times_s = sorted(rng.uniform(0, 4) for _ in range(round(2 * rate)))
        requests += draw_requests(share, times_s, lengths, rng, sources)
    return ordered_workload(shares, requests)


def test_a_fleet_of_one_has_the_figures_of_an_engine_alone() -> None:
    workload, engine = crowd(20), replace(ENGINE, noise=0.1)
    alone = Replay(engine, workload)
    alone.run()
    fleet = FleetReplay(FleetSimSettings(replicas=1, engine=engine), workload)
    fleet.run()
    one, other = figures(alone), figures(fleet)
    assert (one.requests, one.finished, one.steps) == (other.requests, other.finished, other.steps)
    assert one.ttft_s == other.ttft_s
    assert one.tbt_s == other.tbt_s
    assert one.output_tokens_per_s == pytest.approx(other.output_tokens_per_s)


@pytest.mark.parametrize("seed", [0, *fresh_seeds(1)])
def test_the_result_of_a_fleet_is_the_sum_of_its_engines(seed: int) -> None:
    engine = replace(ENGINE, seed=seed, noise=0.1, http=HttpTimes(request_ms=2.0, token_ms=0.1, contention=1.0))
    replay = FleetReplay(FleetSimSettings(replicas=3, engine=engine), crowd(60, seed))
    replay.run()
    found = figures(replay)
    assert found.finished == found.requests == 240
    assert sum(one.finished for one in found.engines) == sum(one.finished for one in found.tenants) == 240
    assert sum(one.steps for one in found.engines) == found.steps
    assert found.busy == pytest.approx(sum(one.busy for one in found.engines) / 3)
    assert all(0 < one.busy <= 1 for one in found.engines)
    assert sum(one.share for one in found.tenants) == pytest.approx(1.0)
    assert found.output_tokens_per_s == pytest.approx(sum(one.output_tokens_per_s for one in found.engines))
    assert found.gap_s is None
    assert replay.timeline.tokens[-1] == sum(one.output_tokens for one in found.tenants)


def test_a_closed_loop_keeps_its_number_of_clients_over_all_engines() -> None:
    settings = FleetSimSettings(replicas=2, engine=replace(ENGINE, concurrency=4))
    replay = FleetReplay(settings, crowd(100), closes_s=2.0)
    seen: list[int] = []
    replay.run(lambda _: seen.append(replay.fleet.num_unfinished))
    assert max(seen) == 4
    assert 4 < figures(replay).finished < 400
    assert replay.now_s > 2.0


def test_reports_are_read_in_the_order_of_their_times() -> None:
    """A late report of one engine must not make the tokens of another one late."""
    engine = replace(ENGINE, http=HttpTimes(token_ms=0.01))
    replay = FleetReplay(FleetSimSettings(replicas=4, engine=engine), crowd(60))
    times_s: list[float] = []
    report = replay.fleet.http.report
    replay.fleet.http.report = lambda now_s: times_s.append(now_s) or report(now_s)  # type: ignore[method-assign]
    replay.run()
    assert times_s
    assert times_s == sorted(times_s)


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


@pytest.mark.slow
def test_a_bound_tenant_gets_its_share_with_weights_of_the_account_and_not_without() -> None:
    found, without = run_bound(4), run_bound(4, has_weights=False)
    assert found.least_part >= 0.9
    assert found.jain >= 0.99
    assert without.least_part < 0.9
    assert without.jain < 0.99


@pytest.mark.slow
def test_a_saturated_fleet_is_balanced_and_a_random_choice_is_not() -> None:
    one = run_saturated_fleet(1, seconds=15.0, begin_s=5.0).tokens_per_s
    assert run_saturated_fleet(32, seconds=15.0, begin_s=5.0).tokens_per_s >= 0.97 * 32 * one
    random_part = run_saturated_fleet(32, placement="at_random", seconds=15.0, begin_s=5.0).tokens_per_s / (32 * one)
    assert random_part < 0.97
