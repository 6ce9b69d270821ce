"""The rules for preemptions for debt and for a share."""

from tests.scheduler.fairness_books import LOW, A, B, C, indebted, patience
from tiercel.scheduler.account import Account
from tiercel.scheduler.preemption_rules import PreemptionRules
from tiercel.values.ids import TenantId


def test_a_debtor_is_preempted_after_the_patience() -> None:
    book = indebted()
    rules = PreemptionRules(book)
    assert not rules.may_preempt_for_debt(B, A, 0.4)
    assert rules.may_preempt_for_debt(B, A, 0.5)
    assert not rules.may_preempt_for_debt(A, B, 0.5)
    assert not rules.may_preempt_for_debt(B, B, 0.5)


def test_service_does_not_reset_the_patience() -> None:
    book = indebted()
    rules = PreemptionRules(book)
    book.charge({B: 40.0}, 0.3)  # no other account is eligible, so all get quanta
    book.refill(0.3)
    book.charge({A: 100.0}, 0.3)
    assert not rules.may_preempt_for_debt(B, A, 0.45)
    assert rules.may_preempt_for_debt(B, A, 0.5)


def test_a_series_of_newcomers_does_not_shield_a_debtor() -> None:
    book = indebted()
    rules = PreemptionRules(book)
    for number in range(4):
        newcomer = Account(0, TenantId(f"n{number}"))
        book.wait(newcomer, 1, 1, 0.15 * number)
        book.wait(newcomer, 0, 0, 0.15 * number + 0.14)
    book.wait(C, 1, 1, 0.6)
    book.charge({B: 41.0}, 0.6)
    book.refill(0.6)
    assert book.is_eligible(C)
    assert patience(book, C, 0.6) == 0.0
    book.charge({A: 70.0}, 0.6)
    assert rules.may_preempt_for_debt(C, A, 1.2)


def test_debt_does_not_count_across_bands() -> None:
    book = indebted()
    rules = PreemptionRules(book)
    book.wait(LOW, 1, 1, 0.0)
    book.refill(0.0)
    assert not rules.may_preempt_for_debt(LOW, A, 9.0)
    assert not rules.may_preempt_for_debt(Account(-1, B.tenant), A, 9.0)


def test_an_account_above_its_share_is_preempted_for_one_below() -> None:
    book = indebted()
    rules = PreemptionRules(book)
    ask = {"would_hold": 0.5, "victim_holds": 0.6}
    assert not rules.may_preempt_for_share(B, A, **ask, now_s=0.4)
    assert rules.may_preempt_for_share(B, A, **ask, now_s=0.5)
    assert not rules.may_preempt_for_share(B, A, would_hold=0.51, victim_holds=0.6, now_s=0.5)
    assert not rules.may_preempt_for_share(B, A, would_hold=0.5, victim_holds=0.5, now_s=0.5)
    assert not rules.may_preempt_for_share(A, B, **ask, now_s=0.5)


def test_an_account_preempts_for_its_share_only_if_it_is_shut_out() -> None:
    book = indebted()
    rules = PreemptionRules(book)
    ask = {"would_hold": 0.5, "victim_holds": 0.6}
    book.run(B, 1, 0.4)
    assert not rules.may_preempt_for_share(B, A, **ask, now_s=0.8)
    assert rules.may_preempt_for_debt(B, A, now_s=0.8), "an admission is no service"
    assert rules.may_preempt_for_share(B, A, **ask, now_s=0.9)


def test_repeated_work_is_paid_by_the_beneficiary_unless_it_is_overdrawn() -> None:
    book = indebted()
    rules = PreemptionRules(book)
    assert rules.payer(A, B) == B
    assert rules.payer(B, A) == B, "the beneficiary is overdrawn"
    assert rules.payer(A, None) == A
    assert rules.payer(A, C) == A, "the beneficiary has ended"


def test_a_preemption_must_be_worth_its_price() -> None:
    book = indebted()  # A owes 30 ms, which is 10 ms beyond D
    rules = PreemptionRules(book)
    worth = book.limits.worth
    assert rules.may_preempt_for_debt(B, A, 0.5, price_ms=10 / worth)
    assert not rules.may_preempt_for_debt(B, A, 0.5, price_ms=10.1 / worth)
    book.bar(A, 5 / worth)
    assert not rules.may_preempt_for_debt(B, A, 0.5, price_ms=10 / worth), "a debt settles one preemption only"
    assert rules.may_preempt_for_debt(B, A, 0.5, price_ms=5 / worth)
    book.charge({A: -31.0}, 0.5)
    book.charge({A: 61.0}, 0.5)
    assert rules.may_preempt_for_debt(B, A, 0.5, price_ms=10 / worth), "a new debt"


def test_a_preemption_for_a_share_must_be_worth_its_price() -> None:
    book = indebted()
    rules = PreemptionRules(book)
    ask = {"would_hold": 0.5, "victim_holds": 0.6}
    assert rules.may_preempt_for_share(B, A, **ask, now_s=0.5, price_ms=500 / book.limits.worth)
    assert not rules.may_preempt_for_share(B, A, **ask, now_s=0.5, price_ms=501 / book.limits.worth)
