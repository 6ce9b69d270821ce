"""Prompt lookup: what is proposed, and when a step gets proposals."""

import random
from array import array

import pytest

from tests.scheduler.planner_bench import PlannerBench
from tests.seeds import fresh_seeds
from tiercel.scheduler.cost import StepCosts, linear_times
from tiercel.scheduler.prompt_lookup import PromptLookup, continuation
from tiercel.scheduler.speculation import accepted_tokens, may_speculate
from tiercel.values.plan import Plan
from tiercel.values.request import SamplingParams


def slow_continuation(tokens: list[int], skip: int, count: int) -> tuple[int, ...]:
    """Do the same one token at a time."""
    for length in (4, 3, 2):
        end = tokens[len(tokens) - length :]
        for at in range(len(tokens) - length - 1, -1, -1):
            if tokens[at : at + length] == end:
                text = list(tokens)
                for place in range(at + length, at + length + skip + count):
                    text.append(text[place])
                return tuple(text[len(tokens) + skip :])
    return ()


@pytest.mark.parametrize("seed", (*range(20), *fresh_seeds(5)))
def test_the_latest_occurrence_of_the_longest_end_is_continued(seed: int) -> None:
    rng = random.Random(seed)
    # Tokens whose bytes repeat: a match between two tokens would be found by bytes alone.
    words = [0, 1, 256, 65_536, 16_777_216, 257]
    tokens = [rng.choice(words) for _ in range(rng.randrange(0, 40))]
    skip, count = rng.randrange(2), rng.randrange(1, 9)
    expected = slow_continuation(tokens, skip, count) if len(tokens) > 2 else ()
    assert continuation(array("I", tokens), skip, count) == expected


def test_a_text_without_repetition_is_not_continued() -> None:
    assert continuation(array("I", range(100)), 0, 4) == ()
    assert continuation(array("I"), 0, 4) == ()


def test_a_period_goes_on() -> None:
    assert continuation(array("I", [9, 1, 2, 1, 2, 1, 2]), 0, 5) == (1, 2, 1, 2, 1)
    assert continuation(array("I", [9, 1, 2, 1, 2, 1, 2]), 1, 3) == (2, 1, 2)


@pytest.mark.parametrize(
    ("proposed", "sampled", "kept"),
    [
        ((1, 2), (1, 2, 3), (1, 2, 3)),
        ((1, 2), (1, 5, 3), (1, 5)),
        ((1, 2), (7, 2, 3), (7,)),
        ((1, 9), (1, 9, 3), (1, 9)),  # 9 ends the sequence
    ],
)
def test_sampled_tokens_count_up_to_the_first_surprise(
    proposed: tuple[int, ...], sampled: tuple[int, ...], kept: tuple[int, ...]
) -> None:
    assert accepted_tokens(proposed, sampled, frozenset({9})) == kept


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.1}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"logprobs": 0},
        {"prompt_lookup_num_tokens": 0}, {"grammar": "start: /a+/"},
    ],
)  # fmt: skip
def test_draws_that_depend_on_rejected_tokens_are_not_speculated(params: dict[str, object]) -> None:
    assert may_speculate(SamplingParams(prompt_lookup_num_tokens=4))
    assert not may_speculate(SamplingParams(**{"prompt_lookup_num_tokens": 4, **params}))  # type: ignore[arg-type]


# ---- when a step gets proposals


def proposals(plan: Plan) -> list[tuple[int, ...]]:
    return [piece.proposed for batch in plan.nano_batches for piece in batch.slices]


def decoding_bench(lookup_tokens: int = 4, *, blocks: int = 100, seqs: int = 8, tokens: int = 16) -> PlannerBench:
    """Return a bench with one sequence that repeats itself, after two output tokens."""
    made = PlannerBench(blocks=blocks, seqs=seqs, tokens=tokens)
    made.submit(1, prompt=3, lookup_tokens=lookup_tokens)
    for _ in range(3):
        made.step()
    return made


def test_a_repeating_text_gets_the_requested_number_of_proposals() -> None:
    bench = decoding_bench()
    plan = bench.launch()
    assert proposals(plan) == [(5, 5, 5, 5)]
    assert plan.is_speculative
    bench.commit(plan)
    assert len(bench.book[1].tokens) == 3 + 3 + 5  # type: ignore[index]
    assert (bench.book.speculation.drafts, bench.book.speculation.accepted) == (1, 4)


def test_proposals_end_at_the_limit_of_the_sequence() -> None:
    bench = PlannerBench()
    bench.submit(1, prompt=3, max_tokens=6, lookup_tokens=9)
    for _ in range(3):
        bench.step()
    assert proposals(bench.step()) == [(5, 5)]
    assert not bench.book.running


def test_nothing_is_proposed_unless_it_was_requested() -> None:
    assert proposals(decoding_bench(lookup_tokens=0).launch()) == [()]


def test_nothing_is_proposed_while_a_sequence_waits() -> None:
    bench = decoding_bench(seqs=1)
    bench.submit(2, prompt=3)
    plan = bench.launch()
    assert proposals(plan) == [()]
    assert not plan.is_speculative


def test_nothing_is_proposed_beside_a_prompt() -> None:
    bench = decoding_bench(tokens=8)
    bench.submit(2, prompt=30)
    assert proposals(bench.step()) == [(), ()]


def test_nothing_is_proposed_while_memory_is_short() -> None:
    bench = decoding_bench()
    bench.planner.cap_forwards(4)
    assert proposals(bench.launch()) == [()]


def test_proposals_take_no_blocks_that_running_sequences_may_need() -> None:
    assert proposals(decoding_bench(blocks=3).launch()) == [()]


def test_proposals_stay_within_the_step() -> None:
    assert proposals(decoding_bench(tokens=4).launch()) == [()]


def test_proposals_that_cost_more_than_they_bring_are_left_out() -> None:
    bench = decoding_bench()
    dear = StepCosts(linear_times(base_ms=1.0, prefill_ms=10.0, decode_ms=0.1))
    plan = bench.planner
    draft_costs = bench.book.policy.costs
    assert draft_costs.step_ms(4, 5, 1, 5) < 2 * draft_costs.step_ms(0, 0, 1, 5)
    bench.book.policy.costs = dear
    assert proposals(plan.plan(bench.cache)) == [()]


def test_a_sequence_whose_guesses_are_wrong_gets_no_proposals_until_they_are_right() -> None:
    bench = PlannerBench(blocks=1000)
    bench.book.policy.costs = StepCosts(linear_times(base_ms=1.0, prefill_ms=0.3, decode_ms=0.1))
    bench.submit(1, prompt=3, max_tokens=990, lookup_tokens=4)
    rng = random.Random(1)
    seen: list[bool] = []
    for number in range(240):
        plan = bench.launch()
        count = sum(piece.num_sampled for batch in plan.nano_batches for piece in batch.slices)
        word = rng.choice([5, 6]) if number < 120 else 7
        bench.book.commit(plan.nano_batches, [word] * count, 0.0)
        seen.append(plan.is_speculative)
    assert any(seen[:20])
    assert not any(seen[100:120])
    assert all(seen[-20:])


def test_guesses_of_ended_sequences_are_forgotten() -> None:
    lookup = PromptLookup()
    bench = PlannerBench(seqs=300, tokens=1000, blocks=10_000)
    bench.planner = type(bench.planner)(bench.book, bench.planner.limits, lookup=lookup)
    for wave in range(20):
        for number in range(20):
            bench.submit(1 + 20 * wave + number, prompt=3, max_tokens=6, lookup_tokens=4)
        while bench.book.running or bench.book.waiting:
            bench.step()
    assert len(lookup._guesses_by_seq) <= 200
