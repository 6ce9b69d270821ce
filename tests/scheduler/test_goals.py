"""How many prompt tokens a step holds beside those that decode, so that it ends within their goal."""

import pytest

from tests.scheduler.planner_bench import BLOCK, PlannerBench, slices
from tiercel.ids import SeqId
from tiercel.scheduler.cost import StepCosts, StepTimes
from tiercel.scheduler.policy import open_policy
from tiercel.scheduler.step_limits import StepLimits

# A step of 64 prompt tokens takes 4 ms behind none and 22 ms behind 400, as attention makes it.
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


def test_a_step_keeps_the_goal_however_far_the_prompt_beside_it_is() -> None:
    bench, costs = stream_beside(400), StepCosts(TIMES)
    lengths: list[int] = []
    while bench.book[SeqId(2)].first_token_s is None:
        plan = bench.step()
        context = next(start for seq, start, _ in slices(plan) if seq == 1)
        for seq, start, length in slices(plan):
            if seq == 2:
                assert costs.step_ms(length, start, 1, context) <= GOAL_MS
                lengths.append(length)
    assert lengths[0] == 60, "all that the step has room for"
    assert BLOCK < lengths[-2] < 40


@pytest.mark.parametrize("first", [500, 300])
def test_a_prompt_far_ahead_counts_whoever_comes_with_it(first: int) -> None:
    """Two prompts under way: what they get together is what the longer context allows."""
    bench, costs = stream_beside(first, 200), StepCosts(TIMES)
    while bench.book[SeqId(3)].first_token_s is None:
        prompts = [(start, length) for seq, start, length in slices(bench.step()) if seq != 1 and length > 1]
        if prompts:
            total, context = sum(length for _, length in prompts), max(start for start, _ in prompts)
            assert total <= BLOCK or costs.step_ms(total, context, 1, 0) <= GOAL_MS


def test_a_goal_that_cannot_be_kept_leaves_a_block_to_the_first_prompt_alone() -> None:
    bench = stream_beside(20, 20)
    bench.planner.set_limits(StepLimits(8, 64, tbt_goal_ms=1.0))
    assert slices(bench.step()) == [(1, 4, 1), (2, 0, BLOCK)]
