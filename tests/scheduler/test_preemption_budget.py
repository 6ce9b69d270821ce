"""The budget of preemptions over the last steps."""

import random

import pytest

from tests.seeds import fresh_seeds
from tiercel.scheduler.preemption_budget import PreemptionBudget
from tiercel.values.ids import SeqId

A, B = SeqId(1), SeqId(2)


def worked(steps: int = 10) -> PreemptionBudget:
    budget = PreemptionBudget(share=0.1, steps=10)
    for _ in range(steps):
        budget.launch(100.0)
    return budget


def test_no_price_is_affordable_before_the_first_step() -> None:
    assert PreemptionBudget().left_ms == 0.0


def test_a_fixed_part_of_the_last_steps_is_affordable() -> None:
    assert worked(5).left_ms == pytest.approx(50.0)
    assert worked(500).left_ms == pytest.approx(100.0)


def test_a_price_is_outstanding_until_the_victim_has_caught_up_and_counts_for_a_window_more() -> None:
    budget = worked()
    budget.spend(A, 60.0)
    for _ in range(50):
        budget.launch(100.0)
    assert budget.left_ms == pytest.approx(40.0), "the victim still waits"
    budget.catch_up(A)
    assert not budget.has_outstanding
    for _ in range(9):
        budget.launch(100.0)
        assert budget.left_ms == pytest.approx(40.0)
    budget.launch(100.0)
    assert budget.left_ms == pytest.approx(100.0)


def test_the_prices_of_one_sequence_add_up_and_are_settled_once() -> None:
    budget = worked()
    budget.spend(A, 60.0)
    budget.spend(A, 30.0)
    budget.spend(B, 5.0)
    assert budget.left_ms == pytest.approx(5.0)
    budget.catch_up(A)
    budget.catch_up(A)
    assert budget.left_ms == pytest.approx(5.0)
    assert budget.has_outstanding


@pytest.mark.parametrize("seed", [1, 2, *fresh_seeds(1)])
def test_repeated_work_of_any_window_stays_within_the_share(seed: int) -> None:
    """Preempt whenever it is affordable, and catch up at random times."""
    rng = random.Random(seed)
    budget, outstanding, repeated_at = PreemptionBudget(share=0.1, steps=50), [], []
    for step in range(3000):
        budget.launch(10.0)
        price_ms = rng.choice([1.0, 5.0, 20.0])
        if price_ms <= budget.left_ms and rng.random() < 0.5:
            budget.spend(SeqId(step), price_ms)
            outstanding.append((SeqId(step), price_ms))
        while outstanding and rng.random() < 0.2:
            seq, price_ms = outstanding.pop(rng.randrange(len(outstanding)))
            budget.catch_up(seq)
            repeated_at.append((step, price_ms))
        budget.check_integrity()
        window_ms = sum(price_ms for at, price_ms in repeated_at if at > step - 50)
        assert window_ms <= 0.1 * 50 * 10.0 + 1e-9
