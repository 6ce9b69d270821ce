"""Deficits: refills, charges, weights, patience and the gate."""

import pytest

from tests.scheduler.fairness_books import LOW, A, B, C, book_with, deficit, indebted, patience
from tiercel.scheduler.fairness_limits import FairLimits, fair_limits
from tiercel.scheduler.policy import open_policy
from tiercel.values.errors import InvariantError

# ---- refill


def test_a_refill_waits_until_every_dispatchable_account_has_spent_its_deficit() -> None:
    book = book_with(A, B)
    book.refill(0.0)
    book.charge({A: 45.0}, 0.0)
    book.refill(0.0)
    assert (deficit(book, A), deficit(book, B)) == (-5.0, 40.0)
    book.charge({B: 40.0}, 0.0)
    book.refill(0.0)
    assert (deficit(book, A), deficit(book, B)) == (35.0, 40.0)


def test_work_that_is_not_dispatchable_does_not_delay_a_refill() -> None:
    book = book_with(A, B)
    book.refill(0.0)
    book.wait(B, 1, 0, 0.0)
    book.charge({A: 45.0}, 0.0)
    book.refill(0.0)
    assert book.is_eligible(A)
    assert deficit(book, B) == 40.0, "capped at its weight times the quantum"


def test_an_account_without_waiting_work_gets_quanta_too() -> None:
    book = book_with(A)
    book.run(B, 1, 0.0)
    book.charge({B: 15.0}, 0.0)
    book.refill(0.0)
    assert deficit(book, B) == 25.0


def test_a_deep_debt_is_refilled_with_several_quanta_at_once() -> None:
    book = book_with(A, B, weights={"a": 1, "b": 2})
    book.charge({A: 100.0, B: 300.0}, 0.0)
    book.refill(0.0)
    assert (deficit(book, A), deficit(book, B)) == (20.0, -60.0)
    assert book.num_refills == 1


def test_a_band_is_refilled_while_a_lower_band_has_deficit_left() -> None:
    book = book_with(A, LOW)
    book.refill(0.0)
    book.charge({A: 50.0}, 0.0)
    book.refill(0.0)
    assert book.is_eligible(A)
    assert deficit(book, LOW) == 40.0


# ---- deficit and debt


def test_an_idle_account_loses_its_deficit_and_keeps_its_debt() -> None:
    book = book_with(A, B, C)
    book.refill(0.0)
    book.charge({B: 50.0}, 0.0)
    for account in (A, B):
        book.wait(account, 0, 0, 1.0)
        book.wait(account, 1, 1, 9.0)
    assert (deficit(book, A), deficit(book, B)) == (0.0, -10.0)


def test_an_account_with_a_running_sequence_is_not_idle() -> None:
    book = book_with(A)
    book.refill(0.0)
    book.wait(A, 0, 0, 5.0)
    book.run(A, 1, 5.0)
    assert deficit(book, A) == 40.0


def test_a_debt_is_limited_only_while_no_other_account_could_use_the_machine() -> None:
    book = book_with(A)
    book.charge({A: 500.0}, 0.0)
    assert deficit(book, A) == -20.0
    book.wait(B, 1, 0, 0.0)  # waits without being dispatchable, for example at its quota
    book.charge({A: 500.0}, 0.0)
    assert deficit(book, A) == -20.0
    book.wait(B, 1, 1, 0.0)
    book.charge({A: 500.0}, 0.0)
    assert deficit(book, A) == -520.0


def test_measured_time_corrects_the_prediction() -> None:
    book = book_with(A, B)
    book.refill(0.0)
    charge = book.charge({A: 6.0, B: 2.0}, 0.0)
    book.settle(charge, 4.0, 0.0)
    assert (deficit(book, A), deficit(book, B)) == (37.0, 39.0)
    assert book.served_ms == {"a": 3.0, "b": 1.0}
    void = book.charge({A: 6.0}, 0.0)
    book.settle(void, 0.0, 0.0)
    assert deficit(book, A) == 37.0
    slow = book.charge({A: 5.0}, 0.0)
    book.settle(slow, 9000.0, 0.0)
    assert deficit(book, A) == 27.0, "a pause of the machine is charged as one longest step"


def test_accounts_keep_their_deficit_per_weight_under_new_weights() -> None:
    book = book_with(A, B)
    book.refill(0.0)
    book.charge({A: 60.0}, 0.0)
    lead = book.lead(A)
    book.set_weights({A.tenant: 4.0}, 0.0)
    assert book.lead(A) == lead
    assert book.share(A) == 0.8
    book.check_integrity()
    with pytest.raises(InvariantError):
        book.set_weights({A.tenant: 0.0}, 0.0)


def test_idle_accounts_without_debt_are_forgotten() -> None:
    book = book_with(A, B)
    book.refill(0.0)
    book.charge({B: 50.0}, 0.0)
    for account in (A, B):
        book.wait(account, 0, 0, 0.0)
    book.refill(0.0)
    assert book.state(A) is None
    assert book.state(B) is not None


# ---- patience and the gate


def test_patience_pauses_without_dispatchable_work_and_ends_with_the_waiting() -> None:
    book = indebted()
    book.wait(B, 1, 0, 0.2)
    book.wait(B, 1, 1, 5.0)
    assert patience(book, B, 5.1) == pytest.approx(0.3)
    book.wait(B, 0, 0, 5.1)
    assert patience(book, B, 6.0) == 0.0


def test_a_barred_tenant_is_not_admitted_while_an_eligible_one_waits() -> None:
    book = indebted()
    book.wait(A, 1, 1, 0.0)
    assert book.may_admit(A, 0.4)
    assert not book.may_admit(A, 0.5), "its sequence would be preempted at once"
    book.bar(A)
    assert not book.may_admit(A, 0.0)
    book.wait(B, 0, 0, 1.0)
    assert book.may_admit(A, 1.0), "no account waits"
    book.wait(B, 1, 1, 2.0)
    book.refill(2.0)
    assert book.is_eligible(A) or not book.may_admit(A, 2.0)


def test_an_overdrawn_tenant_does_not_age_while_others_wait() -> None:
    book = indebted()
    assert not book.may_age(A)
    assert book.may_age(B)
    book.wait(B, 0, 0, 1.0)
    assert book.may_age(A)


# ---- limits


def test_default_limits_follow_the_longest_step() -> None:
    assert fair_limits(25.0, 2.0) == FairLimits(step_ms=25.0, quantum_ms=12.5, debt_ms=100.0, patience_s=2.0)


def test_the_policy_uses_the_default_limits() -> None:
    policy = open_policy("fair", step_ms=25.0, patience_s=2.0)
    assert policy.fair.limits == fair_limits(25.0, 2.0)
    policy.set_pace(10.0, 1.0, 0.0)
    assert policy.fair.limits == fair_limits(10.0, 1.0)
