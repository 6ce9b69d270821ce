"""The guarantees of the scheduler, in the real loop over the real books, in virtual time."""

from collections.abc import Mapping

import pytest

from benchmarks.scenarios.adversary import widest_gap
from benchmarks.scenarios.mixes import (
    run_mixed,
    run_overload,
    run_returning,
    run_saturated,
    run_shared_prefixes,
    run_waiting,
)
from tests.seeds import fresh_seeds
from tiercel.scheduler.aging import AgingShare
from tiercel.scheduler.cost import StepCosts
from tiercel.scheduler.fairness import TenantBook
from tiercel.scheduler.fairness_limits import FairLimits, fair_limits
from tiercel.scheduler.policy import Policy
from tiercel.simulation.simulator import SimSettings
from tiercel.values.ids import TenantId

# Steps and seeds with which a book that refills too much breaks the bound: see the last test with them.
BREAKING_STEPS, BREAKING_SEEDS = 2500, (1, 6)


@pytest.mark.parametrize("seed", [*BREAKING_SEEDS, *fresh_seeds(1)])
@pytest.mark.sampled(1)
def test_service_by_weight_stays_within_the_bound(seed: int) -> None:
    assert 0 < widest_gap(seed, BREAKING_STEPS) <= 1.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_service_by_weight_stays_within_the_bound_for_more_steps(seed: int) -> None:
    assert 0 < widest_gap(seed, 5000) <= 1.0


@pytest.mark.long
@pytest.mark.parametrize("seed", range(200))
def test_service_by_weight_stays_within_the_bound_for_long(seed: int) -> None:
    assert widest_gap(seed, 5000) <= 1.0


class Generous(TenantBook):
    """A faulty book: it gives every tenant a quantum in every step, even one with deficit left."""

    def refill(self, now_s: float) -> None:
        for band in self._bands.values():
            if band.ready:
                self._refill(band, now_s)


def open_generous(settings: SimSettings, costs: StepCosts) -> Policy:
    limits: FairLimits = fair_limits(settings.longest_step_ms, settings.patience_s, quantum_steps=1.0)
    weights: Mapping[TenantId, float] = {}
    return Policy("fair", costs, Generous(limits, weights), AgingShare(settings.longest_step_ms))


@pytest.mark.slow
def test_a_broken_refill_breaks_the_bound() -> None:
    assert all(widest_gap(seed, BREAKING_STEPS, open_generous) > 1.0 for seed in BREAKING_SEEDS)


@pytest.mark.slow
def test_two_saturating_tenants_are_served_by_their_weights_in_any_window() -> None:
    shares = run_saturated((1.0, 3.0), seconds=66.0, window_s=60.0)
    assert shares.parts
    assert all(part == pytest.approx(0.25, rel=0.05) for part in shares.parts)


@pytest.mark.slow
def test_a_tenant_that_returns_gets_half_and_no_more() -> None:
    shares = run_returning(seconds=30.0, away_s=15.0)
    assert shares.parts
    assert all(0.47 <= part <= 0.53 for part in shares.parts)


@pytest.mark.slow
def test_under_fcfs_a_tenant_that_returns_gets_nothing_for_long() -> None:
    shares = run_returning("fcfs", seconds=30.0, away_s=15.0)
    assert shares.parts
    assert max(shares.parts) < 0.25


@pytest.mark.slow
def test_prefix_hits_are_those_of_longest_prefix_match() -> None:
    fair, yardstick = run_shared_prefixes(seconds=8.0), run_shared_prefixes(seconds=8.0, is_yardstick=True)
    assert yardstick.hit_rate > 0.5
    assert fair.hit_rate >= 0.95 * yardstick.hit_rate


@pytest.mark.slow
def test_interactive_goals_are_met_in_overload_while_batch_work_continues() -> None:
    found = run_overload(seconds=20.0)
    chat, support, nightly = found.tenants
    assert found.busy > 0.99
    assert nightly.finished < nightly.requests, "no overload"
    for tenant in (chat, support):
        assert tenant.ttft_kept is not None
        assert tenant.ttft_kept >= 0.95
    assert nightly.output_tokens > 0


@pytest.mark.slow
def test_a_lower_band_is_served_although_a_higher_one_never_ends() -> None:
    last = run_waiting(seconds=64.0).tenants[1]
    assert last.finished == 1
    assert last.starved_s < 34.0


@pytest.mark.slow
def test_fairness_costs_little_throughput() -> None:
    fair, first_come = run_mixed("fair", seconds=12.0), run_mixed("fcfs", seconds=12.0)
    assert fair.finished == first_come.finished == fair.requests
    assert fair.jain > first_come.jain
    assert first_come.virtual_s / fair.virtual_s >= 0.98
