"""Predicted step times: inside and outside the table, corrections, and the division among payers."""

import random

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tiercel.scheduler.cost import StepCosts, StepTimes, linear_times, mean_context, work_by_payer
from tiercel.values.errors import InvariantError

AXES = ((0, 64, 512), (0, 4, 32), (0, 1000, 20_000))


def measured(seed: int = 0) -> StepTimes:
    """Return a noisy table, in which some larger steps are faster than smaller ones."""
    rng = random.Random(seed)
    ms = [
        (3 + max(0.5 * decodes, 0.1 * prefill) + 0.05 * prefill + 1e-4 * context + 1e-7 * prefill * context)
        * rng.uniform(0.8, 1.2)
        for prefill in AXES[0]
        for decodes in AXES[1]
        for context in AXES[2]
    ]
    return StepTimes(prefill_tokens=AXES[0], decodes=AXES[1], context_tokens=AXES[2], ms=tuple(ms))


SHAPES = st.tuples(st.integers(0, 2000), st.integers(0, 100), st.integers(0, 100_000))


@given(seed=st.integers(0, 5), shape=SHAPES, more=SHAPES)
def test_a_larger_step_is_never_predicted_faster(seed: int, shape: tuple[int, int, int], more: tuple[int, int, int]):
    costs = StepCosts(measured(seed))
    larger = [first + second for first, second in zip(shape, more, strict=True)]
    assert costs.predict_ms(*shape) <= costs.predict_ms(*larger) + 1e-9


def test_a_measured_point_is_never_predicted_below_its_time() -> None:
    times = measured()
    costs = StepCosts(times)
    points = [(p, d, c) for p in AXES[0] for d in AXES[1] for c in AXES[2]]
    for point, ms in zip(points, times.ms, strict=True):
        if point[0] or point[1]:
            assert costs.predict_ms(*point) >= ms - 1e-9


def test_a_linear_machine_is_predicted_exactly_inside_and_beyond() -> None:
    costs = StepCosts(linear_times(2.0, 0.1, 0.5, 0.001))
    for shape in ((10, 3, 700), (2048, 64, 65536), (9000, 3, 10), (10, 500, 10), (7, 7, 10**6)):
        expected = 2.0 + 0.1 * shape[0] + 0.5 * shape[1] + 0.001 * shape[2]
        assert costs.predict_ms(*shape) == pytest.approx(expected)
    assert costs.predict_ms(0, 0, 500) == 0.0


@pytest.mark.parametrize("wrong", ["axis", "size", "order", "value"])
def test_a_table_that_is_not_a_grid_is_refused(wrong: str) -> None:
    times = measured()
    broken = {
        "axis": {"prefill_tokens": (1, 64, 512)},
        "size": {"ms": times.ms[1:]},
        "order": {"decodes": (0, 32, 4)},
        "value": {"ms": (float("nan"), *times.ms[1:])},
    }[wrong]
    with pytest.raises(InvariantError):
        StepCosts(msgspec.structs.replace(times, **broken))


def test_the_factor_follows_measured_times() -> None:
    costs = StepCosts(linear_times())
    for _ in range(100):
        costs.correct(costs.predict_ms(100, 4, 1000), 3 * StepCosts(linear_times()).predict_ms(100, 4, 1000))
    assert costs.scale == pytest.approx(3.0, rel=0.01)


def test_prompts_have_a_factor_of_their_own() -> None:
    costs = StepCosts(linear_times())
    table_ms = costs.prompt_ms(512, 1024)
    for _ in range(100):
        costs.correct(costs.predict_ms(0, 1, 0), 3 * costs.predict_ms(0, 1, 0))
        costs.correct_prompts(512, 1024, table_ms / 2)
    assert costs.prompt_ms(512, 1024) == pytest.approx(table_ms / 2, rel=0.01)
    before = costs.prompt_scale
    costs.correct_prompts(512, 1024, 0.0)
    assert costs.prompt_scale == before, "a void step changes nothing"


def test_the_factor_is_bounded_and_a_pause_changes_it_little() -> None:
    costs = StepCosts(linear_times(), alpha=0.1, max_scale=8.0)
    costs.correct(10.0, 60_000.0)
    assert costs.scale == pytest.approx(1.3)
    for _ in range(1000):
        costs.correct(1.0, 100.0)
    assert costs.scale == 8.0
    for _ in range(1000):
        costs.correct(100.0, 1.0)
    assert costs.scale == 1 / 8.0
    costs.correct(0.0, 5.0)
    costs.correct(5.0, 0.0)
    assert costs.scale == 1 / 8.0


@given(
    seed=st.integers(0, 5),
    goal_ms=st.floats(0, 500),
    prompt=st.integers(0, 50_000),
    decodes=st.integers(0, 50),
    context=st.integers(0, 50_000),
)
def test_the_maximum_prefill_keeps_the_goal_and_one_more_token_does_not(
    seed: int, goal_ms: float, prompt: int, decodes: int, context: int
) -> None:
    costs = StepCosts(measured(seed), margin=1.0)
    costs.correct(1.0, 1.7)
    tokens = costs.max_prefill(goal_ms, prompt, decodes, context)
    assert tokens == 0 or costs.step_ms(tokens, prompt, decodes, context) <= goal_ms + 1e-6
    assert costs.step_ms(tokens + 1, prompt, decodes, context) > goal_ms - 1e-6


def test_the_margin_lowers_the_maximum_prefill() -> None:
    costs = StepCosts(linear_times(5.0, 0.1, 0.0, 0.0), margin=1.25)
    assert costs.max_prefill(costs.safe_ms(25.0), 0, 1, 0) == 150


@example(seed=0, most=121, context=0, loss=0.0)
@given(seed=st.integers(0, 5), most=st.integers(1, 2000), context=st.integers(0, 50_000), loss=st.floats(0, 0.5))
def test_the_minimum_prefill_costs_little_more_per_token_than_a_full_step(
    seed: int, most: int, context: int, loss: float
) -> None:
    costs = StepCosts(measured(seed))
    least = costs.min_prefill(most, context, loss)
    assert 1 <= least <= most
    assert costs.step_ms(least, context, 0, 0) / least <= (1 + loss) * costs.step_ms(most, context, 0, 0) / most + 1e-9


def test_the_minimum_prefill_spreads_the_fixed_cost_of_a_step() -> None:
    costs = StepCosts(linear_times(base_ms=8.0, prefill_ms=1.0))
    assert costs.min_prefill(2048, 0, 0.0) == 2048
    assert costs.min_prefill(2048, 0, 0.05) == 148  # (8 + 148) / 148 = 1.05 * (8 + 2048) / 2048


def test_shares_add_up_to_the_prediction() -> None:
    costs = StepCosts(measured(3))
    rng = random.Random(0)
    for _ in range(50):
        decodes = [(rng.choice("abc"), 1, rng.randrange(2000)) for _ in range(rng.randrange(9))]
        prompts = [(rng.choice("abc"), rng.randint(2, 300), rng.randrange(2000)) for _ in range(3)]
        tokens = sum(length for _, length, _ in prompts)
        prompt_context = mean_context((length, context) for _, length, context in prompts)
        decode_context = sum(context for _, _, context in decodes)
        shares = costs.share_ms(work_by_payer(rng.sample(decodes + prompts, len(decodes) + 3)))
        wanted_ms = costs.step_ms(tokens, prompt_context, len(decodes), decode_context)
        assert sum(shares.values()) == pytest.approx(wanted_ms)
        assert all(share >= 0 for share in shares.values())
    assert costs.share_ms({}) == {}


def test_many_prompts_behind_a_short_prefix_cost_no_more_than_one_behind_it() -> None:
    """Attention reads tokens times context: 31 tails of 64 tokens behind 512 read as much as one of 1,984 tokens."""
    costs = StepCosts(measured(2))
    tails = [(number, 64, 512) for number in range(31)]
    assert sum(costs.share_ms(work_by_payer(tails)).values()) == pytest.approx(costs.step_ms(31 * 64, 512, 0, 0))
    assert mean_context([(64, 512)] * 31) == 512
    assert mean_context([(100, 0), (300, 4000)]) == 3000
    assert mean_context([]) == 0


def test_the_context_of_many_decodes_costs_the_same_per_token_beyond_the_table() -> None:
    """On the table's last interval a prompt's attention rises 512 times as steeply as the context of a decode."""
    axes = ((0, 64, 512), (0, 4, 32), (0, 1000, 20_000))
    times = StepTimes(
        prefill_tokens=axes[0],
        decodes=axes[1],
        context_tokens=axes[2],
        ms=tuple(
            3 + 0.05 * prefill + 0.5 * decodes + 1e-4 * context * max(1, prefill)
            for prefill in axes[0]
            for decodes in axes[1]
            for context in axes[2]
        ),
    )
    costs = StepCosts(times)
    assert costs.predict_ms(0, 32, 200_000) == pytest.approx(3 + 0.5 * 32 + 1e-4 * 200_000)
    assert costs.step_ms(64, 0, 32, 200_000) == pytest.approx(3 + 0.05 * 64 + 0.5 * 32 + 1e-4 * 200_000)


def test_longer_contexts_and_more_tokens_cost_more() -> None:
    costs = StepCosts(linear_times())
    shares = costs.share_ms(work_by_payer([("short", 1, 100), ("long", 1, 50_000), ("new", 500, 0)]))
    assert shares["short"] < shares["long"] < shares["new"]


def test_recomputing_is_cheaper_behind_a_cached_prefix() -> None:
    costs = StepCosts(measured(1))
    assert costs.recompute_ms(0) == 0.0
    assert costs.recompute_ms(100, 400) < costs.recompute_ms(500)
    assert costs.recompute_ms(1024) > 2 * costs.recompute_ms(512) * 0.99


@given(
    seed=st.integers(0, 5),
    step_ms=st.floats(0, 500),
    tokens=st.integers(0, 600),
    mean=st.integers(0, 5000),
    start=st.integers(0, 50_000),
    decodes=st.integers(0, 50),
)
def test_a_prompt_added_to_others_fills_the_step_and_no_more(
    seed: int, step_ms: float, tokens: int, mean: int, start: int, decodes: int
) -> None:
    costs, reads = StepCosts(measured(seed)), tokens * mean
    more = costs.max_added(step_ms, tokens, reads, start, decodes, 9000)

    def ms(added: int) -> float:
        context = (reads + added * start) / (tokens + added)
        return costs.step_ms(tokens + added, context, decodes, 9000)

    if more > 0:
        assert ms(more) <= step_ms + 1e-6
    if more >= 0:
        assert ms(more + 1) > step_ms - 1e-6
    elif tokens:
        assert ms(0) > step_ms - 1e-6
