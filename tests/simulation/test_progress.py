"""Fairness is paid for with a small part of the work, however hostile the mix; and every request ends."""

import pytest
from msgspec.structs import replace

from benchmarks.scenarios.mixes import run_long_prompts
from benchmarks.scenarios.progress import draw_mix, play
from tests.seeds import fast_and_slow, fresh_seeds
from tiercel.scheduler.preemption_budget import LOSS_SHARE
from tiercel.simulation.simulator import SimSettings, Simulation
from tiercel.simulation.workload import PromptPart, SimRequest, Sources
from tiercel.values.ids import TenantId
from tiercel.values.plan import Plan, whole_slices
from tiercel.values.tenant import PolicyName, TenantShare

STEPS = 2000


def check_progress(seed: int) -> None:
    mix = draw_mix(seed, STEPS)
    first_come = play(mix, "fcfs", STEPS)
    assert first_come.ended == len(mix.requests)
    policies: tuple[PolicyName, ...] = ("fair", "priority")
    for policy in policies:
        found = play(mix, policy, STEPS, first_come.until_s)
        reported = f"seed {seed}, {policy}: {found}, first come first served: {first_come}"
        assert found.ended == len(mix.requests), reported
        assert found.useful_ms >= 0.85 * first_come.useful_ms, reported
        assert found.worst_window <= LOSS_SHARE, reported


@pytest.mark.parametrize("seed", fast_and_slow([1, 4], [3, 8, 12, 14, 16, 21]))  # mixes that take little time
@pytest.mark.sampled(1)
def test_no_mix_of_tenants_and_lengths_stops_the_work(seed: int) -> None:
    check_progress(seed)


@pytest.mark.parametrize("seed", fresh_seeds(1))
@pytest.mark.slow
def test_no_new_mix_stops_the_work(seed: int) -> None:
    check_progress(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(180))
def test_none_of_many_mixes_stops_the_work(seed: int) -> None:
    check_progress(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", fresh_seeds(20))
def test_none_of_many_new_mixes_stops_the_work(seed: int) -> None:
    check_progress(seed)


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(120.0, marks=pytest.mark.slow),
        pytest.param(1800.0, marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
    ],
)
def test_tenants_with_long_prompts_keep_nearly_the_throughput_of_first_come_first_served(seconds: float) -> None:
    first_come = run_long_prompts("fcfs", seconds=seconds).useful_tokens_per_s
    for host_blocks, part in ((0, 0.9), (65_536, 0.97)):
        fair = run_long_prompts("fair", host_blocks=host_blocks, seconds=seconds)
        assert fair.useful_tokens_per_s >= part * first_come, (host_blocks, fair.preemptions)


@pytest.mark.parametrize("policy", ["fair", "priority"])
def test_prompts_that_fill_the_pool_one_by_one_all_end(policy: PolicyName) -> None:
    """Four tenants, each with a prompt of fifty steps that needs the whole pool: more than debt and patience allow."""
    settings = SimSettings(
        policy=policy, blocks=103, block_size=4, max_num_batched_tokens=8, max_num_seqs=8, max_model_len=420,
        patience_s=0.1,
    )  # fmt: skip
    tenants = [TenantShare(name=TenantId(f"t{number}")) for number in range(4)]
    simulation, sources = Simulation(settings, tenants), Sources()
    for tenant in tenants:
        simulation.submit(SimRequest(0.0, tenant.name, (PromptPart(sources.new(), 400),), 4))
    while simulation.step():
        assert simulation.machine.steps < 4 * 50 * 1.2
    assert all(tally.finished == 1 for tally in simulation.tally.by_tenant.values())


@pytest.mark.parametrize("seed", [33, 47])
@pytest.mark.sampled(1)
def test_work_that_was_in_flight_at_a_preemption_counts_as_done_twice(seed: int) -> None:
    mix = draw_mix(seed, 600)
    simulation = Simulation(replace(mix.settings, policy="fair", async_depth=1), mix.tenants)
    computed_by_seq: dict[int, int] = {}
    repeated = 0

    def note(plan: Plan) -> None:
        nonlocal repeated
        for piece in whole_slices(plan.nano_batches):
            before, end = computed_by_seq.get(piece.seq, 0), piece.start + piece.length
            repeated += max(0, min(end, before) - piece.start)
            computed_by_seq[piece.seq] = max(before, end)

    simulation.planner.listener = note
    for request in mix.requests:
        while simulation.now_s < request.at_s and simulation.step(request.at_s):
            pass
        simulation.pass_time(request.at_s)
        simulation.submit(request)
    while simulation.step():
        pass
    assert repeated > 0
    assert simulation.book.recomputed_tokens == repeated
