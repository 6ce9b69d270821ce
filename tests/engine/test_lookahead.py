"""Long steps are planned one by one, short steps ahead; the tokens are the same."""

import random

import pytest

from tests.engine.test_loop import END, MAX_MODEL_LEN, VOCAB, Bench, walk
from tiercel.device.sim import SimMachine
from tiercel.engine.lookahead import Lookahead
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


def test_a_long_step_takes_at_least_ten_milliseconds_and_twenty_times_the_planning() -> None:
    lookahead = Lookahead()
    assert [lookahead.is_long(ms) for ms in (9.9, 10.0)] == [False, True]
    lookahead.launched(0.002, is_alone=True)
    assert [lookahead.is_long(ms) for ms in (99.0, 101.0)] == [False, True]
    lookahead.launched(0.050, is_alone=False)  # a step ran at the same time
    assert [lookahead.is_long(ms) for ms in (99.0, 101.0)] == [False, True]
    lookahead.launched(0.012, is_alone=True)  # a single slow plan has little weight
    assert [lookahead.is_long(ms) for ms in (124.0, 126.0)] == [False, True]
    lookahead.launched(0.0005, is_alone=False)
    assert [lookahead.is_long(ms) for ms in (74.0, 76.0)] == [False, True]
