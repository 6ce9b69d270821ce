"""Settings that change while the engine runs: no request is lost, and they apply from the next step on."""

import logging
import random

import pytest

from tiercel.engine.loop import EngineLoop
from tiercel.engine.steering import Steering, daily_blocks, pace_of
from tiercel.kvcache.chain import WriteBudget
from tiercel.scheduler.account import Account
from tiercel.scheduler.cost import StepCosts, linear_times
from tiercel.scheduler.fairness import NoFairness
from tiercel.settings.settings import EngineSettings
from tiercel.simulation.simulator import SimSettings, Simulation
from tiercel.simulation.workload import PromptPart, SimRequest
from tiercel.values.ids import TenantId
from tiercel.values.outcome import TierGauges
from tiercel.values.tenant import PolicyName, TenantShare
from tiercel.values.tier import Tier
from tiercel.wire.frames import SetSettings

LIGHT, HEAVY = (TenantShare(name=TenantId(name), weight=weight) for name, weight in (("light", 1), ("heavy", 3)))
LATER = TenantShare(name=TenantId("later"), band=2)
STARTED = EngineSettings(model="m", max_num_seqs=8, tbt_goal_s=0.0)


class Bench:
    """The simulated engine with the steering of a real one."""

    def __init__(self, policy: PolicyName = "fair", **more: object) -> None:
        settings = SimSettings(blocks=96, max_num_seqs=8, max_num_batched_tokens=128, policy=policy, **more)  # type: ignore[arg-type]
        self.simulation = simulation = Simulation(settings, (LIGHT, HEAVY, LATER))
        self.settings = replaced(policy)
        steering = Steering(simulation.book, simulation.planner, simulation.cache, self.settings, 128)
        self.loop = simulation.loop = EngineLoop(
            simulation.book,
            simulation.cache,
            simulation.planner,
            simulation.machine,
            simulation.tally,
            simulation.clock,
            1,
            simulation.mover,
            steering,
        )
        self.version = 1

    def set(self, settings: EngineSettings) -> None:
        self.version += 1
        self.loop.take([SetSettings(self.version, settings)])
        self.loop.check_integrity()

    def ask(self, share: TenantShare, count: int, prompt: int = 60, outputs: int = 30) -> None:
        for _ in range(count):
            self.version += 1  # a different prompt
            at_s = self.simulation.now_s
            self.simulation.submit(SimRequest(at_s, share.name, (PromptPart(self.version, prompt),), outputs))

    def steps(self, most: int) -> None:
        for _ in range(most):
            if not self.simulation.step():
                return

    def finish(self) -> None:
        while self.simulation.step():
            pass
        self.loop.check_integrity()


def replaced(policy: PolicyName = "fair", **more: object) -> EngineSettings:
    fields = {"model": "m", "max_num_seqs": 8, "tbt_goal_s": 0.0, "scheduling_policy": policy, **more}
    return EngineSettings(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sampled(2)
def test_changing_the_policy_loses_no_sequence_in_any_state(seed: int) -> None:
    """The pool is small, so that at every change some sequences run, some wait and some are preempted."""
    rng = random.Random(seed)
    bench = Bench(host_blocks=64)
    asked = 0
    for _ in range(24):
        for share in (LIGHT, HEAVY, LATER):
            count = rng.randrange(4)
            bench.ask(share, count, prompt=rng.randrange(20, 200), outputs=rng.randrange(5, 60))
            asked += count
        bench.steps(rng.randrange(1, 12))
        before = (set(bench.simulation.book.waiting), {one.id for one in bench.simulation.book.running})
        bench.set(replaced(rng.choice(["fair", "priority", "fcfs"])))
        assert before == (set(bench.simulation.book.waiting), {one.id for one in bench.simulation.book.running})
    bench.finish()
    tallies = bench.simulation.tally.by_tenant.values()
    assert sum(tally.finished for tally in tallies) == sum(tally.submitted for tally in tallies) == asked
    assert not bench.simulation.book.num_preempted


def test_the_new_policy_orders_the_sequences_that_already_wait() -> None:
    bench = Bench("fcfs")
    bench.ask(LATER, 6)
    bench.simulation.pass_time(1.0)
    bench.ask(LIGHT, 6)
    first = [bench.simulation.book[seq].request.tenant for seq in bench.simulation.planner.order(1.0)]
    bench.set(replaced("priority"))
    then = [bench.simulation.book[seq].request.tenant for seq in bench.simulation.planner.order(1.0)]
    assert first == [LATER.name] * 6 + [LIGHT.name] * 6
    assert then == [LIGHT.name] * 6 + [LATER.name] * 6
    assert bench.simulation.policy.queue[next(iter(bench.simulation.book.waiting))].since_s == 0.0


def test_after_a_switch_to_fair_service_follows_the_weights() -> None:
    bench = Bench("fcfs")
    for _ in range(150):
        bench.ask(LIGHT, 1, outputs=20)
        bench.ask(HEAVY, 1, outputs=20)
    bench.steps(30)
    bench.set(replaced("fair"))
    output = {name: tally.output_tokens for name, tally in bench.simulation.tally.by_tenant.items()}
    bench.steps(400)
    gained = {name: tally.output_tokens - output[name] for name, tally in bench.simulation.tally.by_tenant.items()}
    assert bench.simulation.book.waiting
    assert 2.2 < gained[HEAVY.name] / gained[LIGHT.name] < 3.8


def test_debts_are_reset_and_service_goes_on() -> None:
    bench = Bench("fair")
    bench.ask(LIGHT, 20)
    bench.ask(HEAVY, 20)
    bench.steps(60)
    served = dict(bench.simulation.policy.fair.served_ms)
    assert all(served.values())
    bench.set(replaced("priority"))
    assert isinstance(bench.simulation.policy.fair, NoFairness)
    bench.steps(5)
    bench.set(replaced("fair"))
    fair = bench.simulation.policy.fair
    assert fair.served_ms == served
    assert {fair.lead(Account(0, name)) for name in served} == {0.0}
    bench.finish()
    assert all(fair.served_ms[name] > served[name] for name in served)


def test_the_limit_of_sequences_can_be_lowered_and_not_raised_above_its_start() -> None:
    bench = Bench("fair")
    bench.ask(LIGHT, 40, prompt=20, outputs=10)
    bench.steps(5)
    assert len(bench.simulation.book.running) == 8
    bench.set(replaced("fair", max_num_seqs=3))
    assert len(bench.simulation.book.running) == 8  # running sequences go on
    while len(bench.simulation.book.running) > 3:
        bench.steps(1)
    seen = 0
    for _ in range(40):
        bench.steps(1)
        seen = max(seen, len(bench.simulation.book.running))
    assert seen == 3
    bench.set(replaced("fair", max_num_seqs=500))
    assert bench.simulation.planner.limits.max_num_seqs == 8
    bench.set(replaced("fair", max_num_seqs=3))
    bench.set(replaced("fair", max_num_seqs=None))  # the default, which was chosen at the start
    assert bench.simulation.planner.limits.max_num_seqs == 8
    bench.finish()


def test_goals_and_caps_of_a_step_reach_the_planner_and_the_pace() -> None:
    bench = Bench("fair")
    bench.set(replaced("fair", tbt_goal_s=0.008, long_prefill_token_threshold=32, max_long_partial_prefills=1))
    limits = bench.simulation.planner.limits
    assert (limits.tbt_goal_ms, limits.long_prefill_token_threshold, limits.max_long_partial_prefills) == (8.0, 32, 1)
    fair = bench.simulation.policy.fair
    costs = StepCosts(linear_times())
    assert fair.limits.step_ms == pace_of(replaced("fair", tbt_goal_s=0.008), costs, 128).step_ms
    assert fair.limits.step_ms < pace_of(STARTED, costs, 128).step_ms
    bench.ask(LIGHT, 1, prompt=100)
    bench.steps(1)
    assert bench.simulation.book.running[0].scheduled == 32


def ssd(bench: Bench) -> TierGauges:
    return next(gauges for gauges in bench.simulation.cache.tier_gauges() if gauges.tier is Tier.SSD)


def test_the_daily_limit_of_the_disk_changes_and_earlier_writes_count() -> None:
    assert daily_blocks(replaced("fair", kv_disk_daily_bytes=0), 1000) == 0
    assert daily_blocks(replaced("fair", kv_disk_daily_bytes=1), 1000) == 1
    budget = WriteBudget(100)
    budget.spend(30)
    budget.change(200)
    assert budget.blocks == 170
    budget.change(20)
    assert budget.blocks == 0
    budget.change(0)
    assert budget.blocks is None
    budget.spend(1000)
    budget.change(50)
    assert budget.blocks == 50
    bench = Bench("fair", disk_blocks=100)
    assert ssd(bench).daily_blocks == 0
    block_bytes = bench.simulation.planner.limits.block_bytes
    bench.set(replaced("fair", kv_disk_daily_bytes=7 * block_bytes))
    assert (ssd(bench).daily_blocks, ssd(bench).writable_blocks) == (7, 7)


def test_the_log_level_is_only_set_when_it_changes() -> None:
    bench = Bench("fair")
    logging.getLogger().setLevel("ERROR")
    bench.set(replaced("fair", max_num_seqs=4))
    assert logging.getLogger().level == logging.ERROR
    bench.set(replaced("fair", log_level="debug"))
    assert logging.getLogger().level == logging.DEBUG


def test_the_longest_step_is_the_one_that_prompts_alone_may_fill() -> None:
    """The pace and the planner use the same rule for prompts without context."""
    costs = StepCosts(linear_times(base_ms=30.0, prefill_ms=4.0))
    settings = replaced("fair", tbt_goal_s=0.2)
    whole, cut = (pace_of(settings, costs, 2048, yields=yields).step_ms for yields in (False, True))
    assert whole == pytest.approx(200.0)  # with decodes; a prompt alone takes the whole budget
    simulation = Simulation(
        SimSettings(times=linear_times(base_ms=30.0, prefill_ms=4.0, context_ms=0.0), tbt_goal_ms=200.0, yields=True),
        (LIGHT,),
    )
    simulation.submit(SimRequest(0.0, LIGHT.name, (PromptPart(1, 4096),), 1))
    simulation.step()
    assert 1e3 * simulation.machine.busy_s == pytest.approx(cut, rel=0.1)
    assert cut == pytest.approx(30 + 4 * 225, rel=0.1)
