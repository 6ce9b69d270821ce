"""Deficits, and the bound on service that follows from them, in virtual time."""

import random

import pytest

from tests.scheduler.adversary import GapMeter, Machine, Schemer, widest_gap
from tiercel.errors import InvariantError
from tiercel.ids import TenantId
from tiercel.scheduler.account import Account, AccountState
from tiercel.scheduler.aging import AgingShare
from tiercel.scheduler.fairness import TenantBook
from tiercel.scheduler.fairness_limits import FairLimits, fair_limits
from tiercel.scheduler.policy import open_policy
from tiercel.scheduler.preemption_rules import PreemptionRules

LIMITS = FairLimits(step_ms=10, quantum_ms=40, debt_ms=20, patience_s=0.5)
A, B, C = (Account(0, TenantId(name)) for name in "abc")
LOW = Account(1, TenantId("a"))


def book_with(*ready: Account, weights: dict[str, float] | None = None) -> TenantBook:
    book = TenantBook(LIMITS, {TenantId(name): weight for name, weight in (weights or {}).items()})
    for account in ready:
        book.wait(account, 1, 1, 0.0)
    return book


def deficit(book: TenantBook, account: Account) -> float:
    state = book.state(account)
    return state.deficit_ms if state is not None else 0.0


def patience(book: TenantBook, account: Account, now_s: float) -> float:
    state = book.state(account)
    return state.elapsed_patience_s(now_s) if state is not None else 0.0


# the bound


STEPS = 10_000


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 20))])
def test_service_follows_the_weights_within_the_bound(seed: int) -> None:
    assert widest_gap(seed, STEPS) <= 1


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(20, 200))
def test_service_follows_the_weights_within_the_bound_for_many_more(seed: int) -> None:
    assert widest_gap(seed, STEPS) <= 1


def open_doubled(limits: FairLimits, weights: dict[TenantId, float]) -> TenantBook:
    """A book that is half as fair as it promises."""
    doubled = FairLimits(
        step_ms=limits.step_ms,
        quantum_ms=2 * limits.quantum_ms,
        debt_ms=2 * limits.debt_ms,
        patience_s=2 * limits.patience_s,
    )
    return TenantBook(doubled, weights)


@pytest.mark.slow
def test_a_doubled_unfairness_breaks_the_bound_of_three_seeds_in_four() -> None:
    assert sum(widest_gap(seed, STEPS, open_doubled) > 1 for seed in range(20)) >= 15


class RefillsTooEarly(TenantBook):
    """Quanta as soon as anybody who waits has spent theirs: what the others did not use is lost at the cap."""

    def refill(self, now_s: float) -> None:
        for band in self._bands.values():
            if band.num_patient < len(band.ready):
                self._refill(band, now_s)


class RefillsTooLate(TenantBook):
    """Waits for those, too, whose waiting work could not run."""

    def refill(self, now_s: float) -> None:
        if not any(one.num_waiting and one.deficit_ms > 0 for one in self._states.values()):
            super().refill(now_s)


class ForgivesDebt(TenantBook):
    """Clamps debt although others wait."""

    def _clamp(self, state: AccountState) -> None:
        state.deficit_ms = max(state.deficit_ms, -state.weight * self.limits.debt_ms)


class KeepsDebt(TenantBook):
    """Never clamps: using an idle machine is paid for when company comes."""

    def _clamp(self, state: AccountState) -> None:
        pass


class NeverPreempts(PreemptionRules):
    """Rules under which debt has no consequence for running sequences."""

    def may_preempt_for_debt(
        self, beneficiary: Account, victim: Account, now_s: float, *, price_ms: float = 0.0
    ) -> bool:
        return False


class LosesPatience(TenantBook):
    """Service resets the patience of who waits, and nobody watches the debtor."""

    def _update(self, state: AccountState, now_s: float) -> None:
        was_patient = state.is_patient
        super()._update(state, now_s)
        if was_patient and not state.is_patient:
            state.patience_s = 0.0

    def is_overdue(self, state: AccountState, now_s: float) -> bool:
        return False


BROKEN = [
    (RefillsTooEarly, PreemptionRules),
    (RefillsTooLate, PreemptionRules),
    (ForgivesDebt, PreemptionRules),
    (KeepsDebt, PreemptionRules),
    (LosesPatience, PreemptionRules),
    (TenantBook, NeverPreempts),
]


@pytest.mark.parametrize(("book", "rules"), BROKEN)
def test_the_bound_fails_when_a_rule_is_broken(book: type[TenantBook], rules: type[PreemptionRules]) -> None:
    assert any(widest_gap(seed, STEPS, book, rules) > 1 for seed in (0, 3, 5))


# shares over time


def saturate(machine: Machine, names: str, seconds: float, depth: int = 2) -> list[tuple[float, dict[str, float]]]:
    """Keep work of these tenants waiting; returns the measured service of each at every step."""
    history: list[tuple[float, dict[str, float]]] = []
    until_s = machine.now_s + seconds
    while machine.now_s < until_s:
        for name in names:
            for _ in range(machine.waiting(name), depth):
                machine.submit(name, machine.rng.randint(1, 150), machine.rng.randint(1, 30), 4)
        machine.step()
        served = {account.tenant: ms for account, ms in machine.service_ms.items()}
        history.append((machine.now_s, {name: served.get(TenantId(name), 0.0) for name in names}))
    return history


def test_two_saturating_tenants_get_their_weights_over_any_minute() -> None:
    machine = Machine({"a": 1, "b": 3}, seed=1)
    history = saturate(machine, "ab", 150)
    begin = 0
    for now_s, served in history:
        while now_s - history[begin][0] > 60:
            begin += 1
        if begin:
            first, second = (served[name] - history[begin][1][name] for name in "ab")
            assert second / (first + second) == pytest.approx(0.75, rel=0.05)


def test_a_tenant_that_returns_from_idle_gets_half_and_not_more() -> None:
    machine = Machine({"a": 1, "b": 1}, seed=2)
    saturate(machine, "ab", 5)
    saturate(machine, "a", 60)
    before = dict(machine.book.served_ms)
    saturate(machine, "ab", 30)
    gained = {name: machine.book.served_ms[TenantId(name)] - before[TenantId(name)] for name in "ab"}
    assert gained["b"] / sum(gained.values()) == pytest.approx(0.5, abs=0.03)


def test_a_lone_heavy_tenant_is_not_locked_out_when_company_comes() -> None:
    machine = Machine({"a": 1, "b": 1}, seed=3)
    for _ in range(2):
        machine.submit("a", 1, 10_000)
    while machine.now_s < 30:
        machine.step()
    before = machine.book.served_ms[TenantId("a")]
    saturate(machine, "ab", 20)
    assert machine.book.served_ms[TenantId("a")] - before > 0.45 * 20_000


def test_the_lowest_band_gets_its_reserved_share_and_no_more() -> None:
    machine = Machine({"a": 1, "b": 1}, seed=4, starve_s=2.0)
    low = [machine.submit("b", 60, 20, 4, band=1) for _ in range(300)]
    saturate(machine, "a", 100)
    part = machine.service_ms[Account(1, TenantId("b"))] / sum(machine.service_ms.values())
    assert 0.04 <= part <= 0.065
    assert sum(seq not in machine.jobs for seq in low) >= 50, "some of it ends"


def test_without_starvation_a_band_is_strict() -> None:
    machine = Machine({"a": 1, "b": 1}, seed=5, starve_s=1e9)
    saturate(machine, "a", 1, depth=16)
    machine.submit("b", 60, 20, 4, band=1)
    saturate(machine, "a", 20, depth=16)
    assert Account(1, TenantId("b")) not in machine.service_ms


def test_a_late_small_request_does_not_wait_for_a_flood_of_long_ones() -> None:
    machine = Machine({"a": 1, "b": 1}, seed=6)
    for _ in range(200):
        machine.submit("a", 2000, 10, 2)
    waits_s: list[float] = []
    for _ in range(30):
        until_s = machine.now_s + 1.0
        seq, begun_s = machine.submit("b", 20, 5, 2), machine.now_s
        while machine.now_s < until_s:
            machine.step()
        waits_s.append(machine.first_slice_s[seq] - begun_s)
    # At most what is left of the other's quantum and, as the flood's deadlines are older, its next one.
    assert max(waits_s) <= 1e-3 * (2 * machine.limits.quantum_ms + 2 * machine.limits.step_ms)


def test_the_meter_sees_a_gap() -> None:
    machine = Machine({"a": 1, "b": 1})
    meter = GapMeter(machine)
    rng = random.Random(0)
    schemers = [Schemer("a", rng, ("flood",)), Schemer("b", rng, ("flood",))]
    for schemer in schemers:
        schemer.act(machine)
    meter.look()
    machine.book.charge({A: 5.0}, 0.0)
    meter.look()
    assert meter.largest_ms == 5.0


# refill


def test_a_refill_waits_for_everybody_who_could_run() -> None:
    book = book_with(A, B)
    book.refill(0.0)
    book.charge({A: 45.0}, 0.0)
    book.refill(0.0)
    assert (deficit(book, A), deficit(book, B)) == (-5.0, 40.0)
    book.charge({B: 40.0}, 0.0)
    book.refill(0.0)
    assert (deficit(book, A), deficit(book, B)) == (35.0, 40.0)


def test_work_that_cannot_run_does_not_hold_up_a_refill() -> None:
    book = book_with(A, B)
    book.refill(0.0)
    book.wait(B, 1, 0, 0.0)
    book.charge({A: 45.0}, 0.0)
    book.refill(0.0)
    assert book.is_eligible(A)
    assert deficit(book, B) == 40.0, "capped at its weight times the quantum"


def test_who_only_runs_gets_quanta_too() -> None:
    book = book_with(A)
    book.run(B, 1, 0.0)
    book.charge({B: 15.0}, 0.0)
    book.refill(0.0)
    assert deficit(book, B) == 25.0


def test_a_deep_debt_takes_many_quanta_at_once() -> None:
    book = book_with(A, B, weights={"a": 1, "b": 2})
    book.charge({A: 100.0, B: 300.0}, 0.0)
    book.refill(0.0)
    assert (deficit(book, A), deficit(book, B)) == (20.0, -60.0)
    assert book.num_refills == 1


def test_a_band_refills_although_a_lower_one_starves_with_credit() -> None:
    book = book_with(A, LOW)
    book.refill(0.0)
    book.charge({A: 50.0}, 0.0)
    book.refill(0.0)
    assert book.is_eligible(A)
    assert deficit(book, LOW) == 40.0


# credit and debt


def test_credit_is_lost_and_debt_kept_over_an_idle_time() -> None:
    book = book_with(A, B, C)
    book.refill(0.0)
    book.charge({B: 50.0}, 0.0)
    for account in (A, B):
        book.wait(account, 0, 0, 1.0)
        book.wait(account, 1, 1, 9.0)
    assert (deficit(book, A), deficit(book, B)) == (0.0, -10.0)


def test_going_from_the_queue_to_a_row_is_no_idle_time() -> None:
    book = book_with(A)
    book.refill(0.0)
    book.wait(A, 0, 0, 5.0)
    book.run(A, 1, 5.0)
    assert deficit(book, A) == 40.0


def test_a_debt_is_clamped_only_while_nobody_else_could_use_the_machine() -> None:
    book = book_with(A)
    book.charge({A: 500.0}, 0.0)
    assert deficit(book, A) == -20.0
    book.wait(B, 1, 0, 0.0)  # waits, but for something else: at its quota, that may be for ever
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


def test_new_weights_keep_everybodys_place() -> None:
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


# preemption for debt and for share


def indebted() -> TenantBook:
    """A in deep debt, B eligible and waiting since 0."""
    book = book_with(A, B)
    book.refill(0.0)
    book.run(A, 1, 0.0)
    book.charge({A: 70.0}, 0.0)
    return book


def test_debt_is_preempted_after_the_patience() -> None:
    book = indebted()
    rules = PreemptionRules(book)
    assert not rules.may_preempt_for_debt(B, A, 0.4)
    assert rules.may_preempt_for_debt(B, A, 0.5)
    assert not rules.may_preempt_for_debt(A, B, 0.5)
    assert not rules.may_preempt_for_debt(B, B, 0.5)


def test_service_does_not_reset_the_patience() -> None:
    book = indebted()
    rules = PreemptionRules(book)
    book.charge({B: 40.0}, 0.3)  # spent; nobody else is eligible, so all get quanta
    book.refill(0.3)
    book.charge({A: 100.0}, 0.3)
    assert not rules.may_preempt_for_debt(B, A, 0.45)
    assert rules.may_preempt_for_debt(B, A, 0.5)


def test_patience_rests_while_nothing_could_run_and_ends_with_the_waiting() -> None:
    book = indebted()
    book.wait(B, 1, 0, 0.2)
    book.wait(B, 1, 1, 5.0)
    assert patience(book, B, 5.1) == pytest.approx(0.3)
    book.wait(B, 0, 0, 5.1)
    assert patience(book, B, 6.0) == 0.0


def test_newcomers_who_never_stay_do_not_shield_a_debtor() -> None:
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


def test_debt_is_no_reason_across_bands() -> None:
    book = indebted()
    rules = PreemptionRules(book)
    book.wait(LOW, 1, 1, 0.0)
    book.refill(0.0)
    assert not rules.may_preempt_for_debt(LOW, A, 9.0)
    assert not rules.may_preempt_for_debt(Account(-1, B.tenant), A, 9.0)


def test_a_barred_tenant_is_not_admitted_while_an_eligible_one_waits() -> None:
    book = indebted()
    book.wait(A, 1, 1, 0.0)
    assert book.may_admit(A, 0.4)
    assert not book.may_admit(A, 0.5), "it would be preempted at once"
    book.bar(A)
    assert not book.may_admit(A, 0.0)
    book.wait(B, 0, 0, 1.0)
    assert book.may_admit(A, 1.0), "nobody waits"
    book.wait(B, 1, 1, 2.0)
    book.refill(2.0)
    assert book.is_eligible(A) or not book.may_admit(A, 2.0)


def test_an_overdrawn_tenant_does_not_age_while_others_wait() -> None:
    book = indebted()
    assert not book.may_age(A)
    assert book.may_age(B)
    book.wait(B, 0, 0, 1.0)
    assert book.may_age(A)


def test_room_is_taken_from_who_holds_more_than_the_share() -> None:
    book = indebted()
    rules = PreemptionRules(book)
    ask = {"would_hold": 0.5, "victim_holds": 0.6}
    assert not rules.may_preempt_for_share(B, A, **ask, now_s=0.4)
    assert rules.may_preempt_for_share(B, A, **ask, now_s=0.5)
    assert not rules.may_preempt_for_share(B, A, would_hold=0.51, victim_holds=0.6, now_s=0.5)
    assert not rules.may_preempt_for_share(B, A, would_hold=0.5, victim_holds=0.5, now_s=0.5)
    assert not rules.may_preempt_for_share(A, B, **ask, now_s=0.5)


def test_room_is_taken_only_after_nothing_has_come_in_for_the_patience() -> None:
    book = indebted()
    rules = PreemptionRules(book)
    ask = {"would_hold": 0.5, "victim_holds": 0.6}
    book.run(B, 1, 0.4)
    assert not rules.may_preempt_for_share(B, A, **ask, now_s=0.8)
    assert rules.may_preempt_for_debt(B, A, now_s=0.8), "coming in is no service"
    assert rules.may_preempt_for_share(B, A, **ask, now_s=0.9)


def test_wasted_work_is_paid_by_who_caused_it_as_far_as_its_credit_goes() -> None:
    book = indebted()
    rules = PreemptionRules(book)
    assert rules.payer(A, B) == B
    assert rules.payer(B, A) == B, "the culprit is overdrawn"
    assert rules.payer(A, None) == A
    assert rules.payer(A, C) == A, "the culprit has gone"


# aging


def test_the_aging_share_is_its_part_of_all_service() -> None:
    aging = AgingShare(10.0)
    aged_ms = 0.0
    for _ in range(10_000):
        given = 7.0 if aging.is_due else 0.0
        aged_ms += given
        aging.add(10.0, given)
    assert aged_ms == pytest.approx(0.05 * 10_000 * 10.0, rel=0.01)


def test_unused_aging_is_not_saved_up() -> None:
    aging = AgingShare(10.0)
    for _ in range(10_000):
        aging.add(10.0, 0.0)
    aging.add(0.0, 10.0)
    assert not aging.is_due
    assert not aging.is_spent
    aging.add(0.0, 201.0)
    assert aging.is_spent
    aging.add(0.0, 1e6)
    for _ in range(401):
        aging.add(10.0, 0.0)
    assert aging.is_due, "what was served beyond what is lent delays nobody else"


def test_default_limits_follow_the_longest_step() -> None:
    assert fair_limits(25.0, 2.0) == FairLimits(step_ms=25.0, quantum_ms=12.5, debt_ms=100.0, patience_s=2.0)


def test_the_engine_keeps_the_limits_that_are_tested_here() -> None:
    policy = open_policy("fair", step_ms=25.0, patience_s=2.0)
    assert policy.fair.limits == fair_limits(25.0, 2.0)
    policy.set_pace(10.0, 1.0, 0.0)
    assert policy.fair.limits == fair_limits(10.0, 1.0)


def test_a_preemption_must_be_worth_its_price() -> None:
    book = indebted()  # A owes 30 ms, 10 of them beyond D
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


def test_room_for_a_share_is_taken_when_the_waiting_was_worth_the_price() -> None:
    book = indebted()
    rules = PreemptionRules(book)
    ask = {"would_hold": 0.5, "victim_holds": 0.6}
    assert rules.may_preempt_for_share(B, A, **ask, now_s=0.5, price_ms=500 / book.limits.worth)
    assert not rules.may_preempt_for_share(B, A, **ask, now_s=0.5, price_ms=501 / book.limits.worth)
