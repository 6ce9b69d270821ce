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

    def __init__(
        self, *, blocks: int, depth: int, seqs: int, tokens: int, goal_ms: float, decode_ms: float = 0.4
    ) -> None:
        super().__init__(blocks=blocks, depth=depth, seqs=seqs, tokens=tokens)
        costs = StepCosts(linear_times(base_ms=7.0, prefill_ms=0.7, decode_ms=decode_ms))
        self.book = SequenceBook(open_policy("fcfs", costs), MAX_MODEL_LEN, END)
        self.machine = SimMachine(self.book, 4, VOCAB, self.clock, max_rows=seqs + 1, step_s=lambda _: 9e-3)
        limits = StepLimits(seqs, tokens, tbt_goal_ms=goal_ms, yield_ms=goal_ms)
        planner = Planner(self.book, limits)
        self.loop = EngineLoop(self.book, self.cache, planner, self.machine, self.client, self.clock, depth)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("seed", range(15))
@pytest.mark.sampled(5)
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


@pytest.mark.parametrize(("goal_ms", "is_long"), [(0.0, False), (15.0, True), (60.0, True)])
def test_the_step_after_a_prompt_is_planned_when_it_has_ended(goal_ms: float, is_long: bool) -> None:
    bench = YieldingBench(blocks=24, depth=1, seqs=1, tokens=8, goal_ms=goal_ms)
    seq = bench.submit([1] * 8)
    assert bench.loop.step()  # predicted to take 7 + 8 * 0.7 = 12.6 ms
    assert (seq in bench.client.tokens) is is_long
    bench.run()
    bench.assert_all_right()


@pytest.mark.parametrize(("goal_ms", "is_long"), [(40.0, True), (60.0, False)])
def test_decodes_of_less_than_half_the_goal_are_planned_ahead(goal_ms: float, is_long: bool) -> None:
    bench = YieldingBench(blocks=24, depth=1, seqs=1, tokens=8, goal_ms=goal_ms, decode_ms=18.0)
    seq = bench.submit([1] * 8)
    assert bench.loop.step()  # the prompt, which is long
    assert bench.loop.step()  # a decode, predicted to take 7 + 18 = 25 ms
    assert len(bench.client.tokens[seq]) == (2 if is_long else 1)
    bench.run()
    bench.assert_all_right()
