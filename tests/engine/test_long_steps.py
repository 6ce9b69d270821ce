"""Long steps are planned one by one, short steps ahead; the tokens are the same."""

import random

import pytest

from tests.engine.test_loop import END, MAX_MODEL_LEN, VOCAB, Bench, walk
from tiercel.device.sim import SimMachine
from tiercel.engine.loop import EngineLoop
from tiercel.scheduler.book import SequenceBook
from tiercel.scheduler.cost import StepCosts, linear_times
from tiercel.scheduler.planner import Planner
from tiercel.scheduler.policy import open_policy
from tiercel.scheduler.step_limits import StepLimits


class YieldingBench(Bench):
    """The simulated loop with some long steps."""

    def __init__(self, *, blocks: int, depth: int, seqs: int, tokens: int, goal_ms: float) -> None:
        super().__init__(blocks=blocks, depth=depth, seqs=seqs, tokens=tokens)
        costs = StepCosts(linear_times(base_ms=7.0, prefill_ms=0.7, decode_ms=0.4))
        self.book = SequenceBook(open_policy("fcfs", costs), MAX_MODEL_LEN, END)
        self.machine = SimMachine(self.book, 4, VOCAB, self.clock, max_rows=seqs + 1, step_s=lambda _: 9e-3)
        limits = StepLimits(seqs, tokens, tbt_goal_ms=goal_ms, yield_ms=goal_ms)
        planner = Planner(self.book, limits)
        self.loop = EngineLoop(self.book, self.cache, planner, self.machine, self.client, self.clock, depth)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("seed", range(15))
def test_random_work_of_long_and_short_steps_gives_the_right_tokens(seed: int, depth: int) -> None:
    rng = random.Random(seed)
    bench = YieldingBench(
        blocks=rng.choice([24, 30, 60]),
        depth=depth,
        seqs=rng.choice([1, 3, 8]),
        tokens=rng.choice([8, 64]),
        goal_ms=rng.choice([0.0, 9.0, 15.0, 40.0]),
    )
    walk(bench, seed, rng, refusals=0.1)


@pytest.mark.parametrize(("goal_ms", "is_long"), [(0.0, False), (15.0, True), (24.0, True), (27.0, False)])
def test_a_step_of_at_least_half_the_goal_ends_before_the_next_one_is_planned(goal_ms: float, is_long: bool) -> None:
    bench = YieldingBench(blocks=24, depth=1, seqs=1, tokens=8, goal_ms=goal_ms)
    seq = bench.submit([1] * 8)
    assert bench.loop.step()  # predicted to take 7 + 8 * 0.7 = 12.6 ms
    assert (seq in bench.client.tokens) is is_long
    bench.run()
    bench.assert_all_right()
