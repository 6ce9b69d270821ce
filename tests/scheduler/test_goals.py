"""The limit on prompt tokens that keeps a step within the goals of the decoding sequences."""

import pytest

from tests.scheduler.planner_bench import BLOCK, PlannerBench, slices
from tiercel.scheduler.cost import StepCosts, StepTimes, mean_context
from tiercel.scheduler.policy import open_policy
from tiercel.scheduler.step_limits import StepLimits
from tiercel.values.ids import SeqId

# A step of 64 prompt tokens takes 4 ms without context and 22 ms behind 400 tokens, because of attention.
TIMES = StepTimes(
    prefill_tokens=(0, 64),
    decodes=(0, 16),
    context_tokens=(0, 400),
    ms=(2.0, 2.0, 3.0, 3.0, 4.0, 22.0, 5.0, 23.0),
)
GOAL_MS = 12.0


def stream_beside(*prompts: int) -> PlannerBench:
    bench = PlannerBench(blocks=1000, tokens=64, policy=open_policy("fcfs", StepCosts(TIMES)))
    bench.planner.set_limits(StepLimits(8, 64, tbt_goal_ms=GOAL_MS))
    bench.submit(1, 4, max_tokens=900)
    bench.step()
    for seq, prompt in enumerate(prompts, 2):
        bench.submit(seq, prompt)
    return bench


def test_a_step_keeps_the_goal_at_every_position_of_a_prompt() -> None:
    bench, costs = stream_beside(400), StepCosts(TIMES)
    lengths: list[int] = []
    while bench.book[SeqId(2)].first_token_s is None:
        plan = bench.step()
        context = next(start for seq, start, _ in slices(plan) if seq == 1)
        for seq, start, length in slices(plan):
            if seq == 2:
                assert costs.step_ms(length, start, 1, context) <= GOAL_MS
                lengths.append(length)
    assert lengths[0] == 60, "the maximum of the step"
    assert BLOCK < lengths[-2] < 40


@pytest.mark.parametrize("first", [500, 300])
def test_each_prompt_of_a_step_costs_its_own_context(first: int) -> None:
    """Two prompts under way together keep the goal, and a step that is not full for the first one serves both."""
    bench, costs = stream_beside(first, 200), StepCosts(TIMES)
    shared = 0
    while bench.book[SeqId(3)].first_token_s is None:
        prompts = [(start, length) for seq, start, length in slices(bench.step()) if seq != 1 and length > 1]
        if prompts:
            total = sum(length for _, length in prompts)
            context = mean_context((length, start) for start, length in prompts)
            assert total <= BLOCK or costs.step_ms(total, context, 1, 0) <= GOAL_MS
            shared += len(prompts) > 1
    assert shared


def test_if_the_goal_cannot_be_kept_only_the_first_prompt_gets_a_block() -> None:
    bench = stream_beside(20, 20)
    bench.planner.set_limits(StepLimits(8, 64, tbt_goal_ms=1.0))
    assert slices(bench.step()) == [(1, 4, 1), (2, 0, BLOCK)]
