"""The bound on service by weight, against tenants that try to get more, in virtual time."""

import random

import pytest

from tests.scheduler.adversary import GapMeter, Machine, Schemer, widest_gap
from tests.scheduler.fairness_books import A
from tests.seeds import fast_and_slow
from tiercel.scheduler.account import Account, AccountState
from tiercel.scheduler.fairness import TenantBook
from tiercel.scheduler.fairness_limits import FairLimits
from tiercel.scheduler.preemption_rules import PreemptionRules
from tiercel.values.ids import TenantId

STEPS = 10_000


@pytest.mark.parametrize("seed", fast_and_slow(range(4), range(4, 20)))
@pytest.mark.sampled(2)
def test_service_follows_the_weights_within_the_bound(seed: int) -> None:
    assert widest_gap(seed, STEPS) <= 1


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(20, 200))
def test_service_follows_the_weights_within_the_bound_for_more_seeds(seed: int) -> None:
    assert widest_gap(seed, STEPS) <= 1


def open_doubled(limits: FairLimits, weights: dict[TenantId, float]) -> TenantBook:
    """Return a book with twice the limits."""
    doubled = FairLimits(
        step_ms=limits.step_ms,
        quantum_ms=2 * limits.quantum_ms,
        debt_ms=2 * limits.debt_ms,
        patience_s=2 * limits.patience_s,
    )
    return TenantBook(doubled, weights)


@pytest.mark.slow
def test_doubled_limits_break_the_bound_of_three_seeds_in_four() -> None:
    assert sum(widest_gap(seed, STEPS, open_doubled) > 1 for seed in range(20)) >= 15


class RefillsTooEarly(TenantBook):
    """Refills as soon as one waiting account has spent its deficit, so that others lose quanta at their maximum."""

    def refill(self, now_s: float) -> None:
        for band in self._bands.values():
            if band.num_patient < len(band.ready):
                self._refill(band, now_s)


class RefillsTooLate(TenantBook):
    """Delays refills for accounts whose waiting work is not dispatchable, too."""

    def refill(self, now_s: float) -> None:
        if not any(one.num_waiting and one.deficit_ms > 0 for one in self._states.values()):
            super().refill(now_s)


class ForgivesDebt(TenantBook):
    """Limits debt even if other accounts wait."""

    def _clamp(self, state: AccountState) -> None:
        state.deficit_ms = max(state.deficit_ms, -state.weight * self.limits.debt_ms)


class KeepsDebt(TenantBook):
    """Never limits debt: the use of an idle machine is paid for when other tenants begin."""

    def _clamp(self, state: AccountState) -> None:
        pass


class NeverPreempts(PreemptionRules):
    """Rules under which debt has no consequence for running sequences."""

    def may_preempt_for_debt(
        self, beneficiary: Account, victim: Account, now_s: float, *, price_ms: float = 0.0
    ) -> bool:
        return False


class LosesPatience(TenantBook):
    """Resets patience at every service, and ignores how long debtors have been overdrawn."""

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
@pytest.mark.sampled(1)
@pytest.mark.slow
def test_the_bound_fails_when_a_rule_is_broken(book: type[TenantBook], rules: type[PreemptionRules]) -> None:
    assert any(widest_gap(seed, STEPS, book, rules) > 1 for seed in (0, 3, 5))


# ---- shares over time


def saturate(machine: Machine, names: str, seconds: float, depth: int = 2) -> list[tuple[float, dict[str, float]]]:
    """Keep work of these tenants waiting. Return the time and the measured service of each tenant at every step."""
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


def test_two_saturating_tenants_are_served_by_their_weights_in_any_minute() -> None:
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


def test_a_tenant_that_was_alone_is_not_locked_out_when_another_one_begins() -> None:
    machine = Machine({"a": 1, "b": 1}, seed=3)
    for _ in range(2):
        machine.submit("a", 1, 10_000)
    while machine.now_s < 30:
        machine.step()
    before = machine.book.served_ms[TenantId("a")]
    saturate(machine, "ab", 20)
    assert machine.book.served_ms[TenantId("a")] - before > 0.45 * 20_000


def test_the_lowest_band_gets_the_aging_share_and_no_more() -> None:
    machine = Machine({"a": 1, "b": 1}, seed=4, starve_s=2.0)
    low = [machine.submit("b", 60, 20, 4, band=1) for _ in range(300)]
    saturate(machine, "a", 100)
    part = machine.service_ms[Account(1, TenantId("b"))] / sum(machine.service_ms.values())
    assert 0.04 <= part <= 0.065
    assert sum(seq not in machine.jobs for seq in low) >= 50, "some of its requests end"


def test_a_lower_band_is_not_served_before_it_starves() -> None:
    machine = Machine({"a": 1, "b": 1}, seed=5, starve_s=1e9)
    saturate(machine, "a", 1, depth=16)
    machine.submit("b", 60, 20, 4, band=1)
    saturate(machine, "a", 20, depth=16)
    assert Account(1, TenantId("b")) not in machine.service_ms


def test_a_small_request_does_not_wait_for_a_flood_of_long_ones() -> None:
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
    # The rest of the flooding tenant's quantum and, because its deadlines are older, its next quantum.
    assert max(waits_s) <= 1e-3 * (2 * machine.limits.quantum_ms + 2 * machine.limits.step_ms)


def test_the_meter_measures_a_gap() -> None:
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
