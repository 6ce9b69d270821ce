"""What every tenant is owed: the deficits behind the fairness gate. Time is a parameter."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tiercel.errors import InvariantError
from tiercel.ids import TenantId
from tiercel.scheduler.fairness_limits import FairLimits


class Account(NamedTuple):
    """One tenant's work in one priority band: what is queued, gated and charged.

    Deficits belong to accounts, not to tenants: a band must refill although a band below starves with credit left.
    """

    band: int  # lower goes first
    tenant: TenantId


class Charge(NamedTuple):
    """What a launched step was charged, until its time is known."""

    predicted_ms: float
    shares: tuple[tuple[Account, float], ...]  # milliseconds; their sum is `predicted_ms`


class Standing(NamedTuple):
    """One account as metrics show it."""

    account: Account
    weight: float
    deficit_ms: float
    num_waiting: int
    num_running: int
    is_barred: bool


class _State:
    """One account's books."""

    __slots__ = (
        "account", "band", "contested_from_s", "deficit_ms", "entry_patience_s", "idle_from_s", "is_barred",
        "is_eligible", "is_overdrawn", "is_patient", "num_ready", "num_running", "num_waiting", "patience_s",
        "patient_from_s", "settled_ms", "weight",
    )  # fmt: skip

    def __init__(self, account: Account, band: "_Band", weight: float) -> None:
        self.account = account
        self.band = band
        self.weight = weight
        self.deficit_ms = 0.0  # q: service it may still have before others go first; negative: debt
        self.num_waiting = 0
        self.num_ready = 0  # of them dispatchable: nothing but capacity keeps them from a slice
        self.num_running = 0
        self.is_eligible = False  # has deficit left
        self.is_patient = False  # eligible and dispatchable: its patience runs
        self.is_overdrawn = False  # debt beyond D
        self.is_barred = False  # preempted for debt
        self.settled_ms = 0.0  # of this debt: what preemptions for it have settled
        self.patience_s = 0.0  # run so far, without the stretch from patient_from_s on
        self.patient_from_s = 0.0
        self.entry_patience_s = 0.0  # what its patience read when a sequence of it last came in
        self.idle_from_s = 0.0  # when it last had no work any more
        self.contested_from_s = 0.0  # reading of the band's clock when it was overdrawn

    @property
    def has_work(self) -> bool:
        return self.num_waiting > 0 or self.num_running > 0


class _Band:
    """The accounts of one band, and how often which kind is found."""

    __slots__ = ("contested_s", "counted_to_s", "num_patient", "overdrawn", "ready", "working")

    def __init__(self) -> None:
        self.working: dict[Account, _State] = {}  # with any work
        self.ready: dict[Account, _State] = {}  # with dispatchable waiting work
        self.overdrawn: dict[Account, _State] = {}  # with more debt than D
        self.num_patient = 0  # accounts
        self.contested_s = 0.0  # how long somebody's patience has run, whosever it was
        self.counted_to_s = 0.0

    def clock_s(self, now_s: float) -> float:
        """Time during which somebody was eligible, dispatchable and waiting."""
        return self.contested_s + (max(0.0, now_s - self.counted_to_s) if self.num_patient else 0.0)

    def count(self, change: int, now_s: float) -> None:
        self.contested_s = self.clock_s(now_s)
        self.counted_to_s = now_s
        self.num_patient += change


class TenantBook:
    """Deficits of all accounts: the only writer of who is eligible, in debt or barred.

    Inside a band an account with deficit left goes before one without. Each step's predicted milliseconds are charged
    to whom it served and corrected by the measured ones. When every account with dispatchable waiting work has spent
    its deficit, all with any work get a quantum times their weight.

    Cost: constant per account touched; a refill walks the band.
    """

    def __init__(self, limits: FairLimits, weights: Mapping[TenantId, float] | None = None) -> None:
        self.limits = limits
        self._default_weight = 1.0
        self._weights: dict[TenantId, float] = {}
        self._states: dict[Account, _State] = {}
        self._bands: dict[int, _Band] = {}
        self._working_weight = 0.0
        self._turned: set[Account] = set()
        self._idle: list[_State] = []  # without work or debt when they were listed
        self.served_ms: dict[TenantId, float] = {}  # charged since start
        self.largest_price_ms: dict[Account, float] = {}  # of preempting one of its sequences for debt, as asked so far
        self.num_refills = 0
        self.set_shares(weights or {}, 1.0, 0.0)

    # what happens

    def set_shares(self, weights: Mapping[TenantId, float], default: float, now_s: float) -> None:
        """New weights, at any time: everybody keeps deficit per weight. Errors: InvariantError when one is not > 0."""
        if any(not 0 < weight < float("inf") for weight in (default, *weights.values())):
            raise InvariantError("fairness.weight")
        self._weights, self._default_weight = dict(weights), default
        self._weigh(self._states.values(), now_s)

    def set_weight(self, tenant: TenantId, weight: float, now_s: float) -> None:
        """Set the weight of one tenant, as `set_shares`."""
        self._weights[tenant] = weight
        self._weigh(filter(None, (self._states.get(Account(band, tenant)) for band in self._bands)), now_s)

    def _weigh(self, states: Iterable[_State], now_s: float) -> None:
        for state in states:
            weight = self.weight(state.account)
            self._working_weight += weight - state.weight if state.has_work else 0.0
            state.deficit_ms *= weight / state.weight
            state.weight = weight
            self._reflect(state, now_s)

    def set_limits(self, limits: FairLimits, now_s: float) -> None:
        """New limits, as after a calibration."""
        self.limits = limits
        for state in self._states.values():
            state.deficit_ms = min(state.deficit_ms, state.weight * limits.quantum_ms)
            self._reflect(state, now_s)

    def wait(self, account: Account, num_waiting: int, num_ready: int, now_s: float) -> None:
        """So many sequences of the account wait now, so many of them dispatchable.

        Dispatchable: only capacity (blocks, a row, budget) keeps it from a slice; not one that is being restored or
        whose prefix another sequence is computing. A prefill that is not through waits, too.
        """
        state = self._state(account)
        self._return(state, num_waiting > 0 or state.num_running > 0, now_s)
        state.num_waiting, state.num_ready = num_waiting, num_ready
        if num_ready:
            state.band.ready[account] = state
        else:
            state.band.ready.pop(account, None)
        self._reflect(state, now_s)
        if not num_waiting:
            state.patience_s = state.entry_patience_s = 0.0

    def run(self, account: Account, num_running: int, now_s: float) -> None:
        """So many sequences of the account hold blocks now."""
        state = self._state(account)
        self._return(state, num_running > 0 or state.num_waiting > 0, now_s)
        if num_running > state.num_running:
            state.entry_patience_s = self.patience_s(account, now_s)
        state.num_running = num_running
        self._reflect(state, now_s)

    def refill(self, now_s: float) -> None:
        """Start of a plan: quanta for every band in which no dispatchable waiting account has deficit left."""
        self._forget_idle()
        for band in self._bands.values():
            if band.ready and not band.num_patient:
                self._refill(band, now_s)

    def charge(self, shares: Mapping[Account, float], now_s: float) -> Charge:
        """A step is launched: its predicted milliseconds, by who pays."""
        for account, share_ms in shares.items():
            self._pay(account, share_ms, now_s)
        return Charge(sum(shares.values()), tuple(shares.items()))

    def settle(self, charge: Charge, measured_ms: float, now_s: float) -> None:
        """The step took so long: charges are corrected in proportion. 0 gives a void step's charge back.

        What a step took beyond the longest one is nobody's fault and charged to nobody.
        """
        if charge.predicted_ms <= 0:
            return
        paid_ms = min(measured_ms, max(self.limits.step_ms, charge.predicted_ms))
        surplus = paid_ms / charge.predicted_ms - 1
        if abs(surplus) < 1e-9:
            return
        for account, share_ms in charge.shares:
            self._pay(account, share_ms * surplus, now_s)

    def bar(self, victim: Account, price_ms: float = 0.0) -> None:
        """A sequence of the account was preempted for debt: none is admitted while an eligible account waits.

        The debt that made the preemption worth its price justifies no other one.
        """
        state = self._state(victim)
        state.is_barred = True
        state.settled_ms += self.limits.worth * price_ms

    # what follows

    def is_eligible(self, account: Account) -> bool:
        """Deficit left."""
        state = self._states.get(account)
        return state is not None and state.is_eligible

    def is_ready(self, account: Account) -> bool:
        """Has dispatchable waiting work: only capacity keeps it from a slice."""
        state = self._states.get(account)
        return state is not None and state.num_ready > 0

    def debtors(self, creditor: Account, now_s: float) -> frozenset[Account]:
        """The accounts that may be preempted for debt in favour of this one."""
        band = self._bands.get(creditor.band)
        if band is None or not band.overdrawn:
            return frozenset()
        return frozenset(one for one in band.overdrawn if self.may_take_for_debt(creditor, one, now_s))

    def may_admit(self, account: Account, now_s: float) -> bool:
        """False for an account whose work would be preempted for debt at once."""
        state = self._states.get(account)
        if state is None or not state.band.num_patient or not (state.is_barred or state.is_overdrawn):
            return True
        return not (state.is_barred or self._is_overdue(state, now_s))

    def may_age(self, account: Account) -> bool:
        """The aging share is for those who starve, not for those whose debt is why they wait."""
        state = self._states.get(account)
        return state is None or not (state.is_overdrawn and state.band.num_patient)

    def payer(self, owner: Account, culprit: Account | None) -> Account:
        """Who pays for computing again what a preemption threw away: who caused it, as long as its credit allows."""
        state = self._states.get(culprit) if culprit is not None else None
        return owner if state is None or state.is_overdrawn else state.account

    def patience_s(self, account: Account, now_s: float) -> float:
        """How long the account has been eligible and dispatchable since it began to wait. Service does not reset it."""
        state = self._states.get(account)
        if state is None:
            return 0.0
        return state.patience_s + (now_s - state.patient_from_s if state.is_patient else 0.0)

    def may_take_for_debt(self, beneficiary: Account, victim: Account, now_s: float, *, price_ms: float = 0.0) -> bool:
        """Within one band an eligible, dispatchable account may preempt an overdrawn one after its patience.

        Or after the debtor has been overdrawn for as long while anybody at all waited: a row of impatient
        newcomers, none of whom stays, must not shield it. In either case only when the debt beyond D is `worth`
        times the price of the preemption, so that switching costs a small part of what it settles.
        """
        first, second = self._states.get(beneficiary), self._states.get(victim)
        if first is None or second is None or first.band is not second.band:
            return False
        if not first.is_patient or not second.is_overdrawn:
            return False
        if price_ms > self.largest_price_ms.get(victim, 0.0):
            self.largest_price_ms[victim] = price_ms
        beyond_ms = -second.deficit_ms - second.weight * self.limits.debt_ms
        if price_ms > 0 and beyond_ms < second.settled_ms + self.limits.worth * price_ms:
            return False
        is_out = self.patience_s(beneficiary, now_s) >= self.limits.patience_s
        return is_out or self._is_overdue(second, now_s)

    def share(self, account: Account) -> float:
        """The account's part of HBM: its weight among those that have any work, in all bands."""
        state = self._states.get(account)
        weight = self.weight(account) if state is None else state.weight
        total = self._working_weight + (weight if state is None or not state.has_work else 0.0)
        return weight / total

    def is_shut_out(self, account: Account, now_s: float) -> bool:
        """Eligible and dispatchable for as long as its patience, and nothing of it has come in."""
        state = self._states.get(account)
        if state is None or not state.is_patient:
            return False
        return self.patience_s(account, now_s) - state.entry_patience_s >= self.limits.patience_s

    def may_take_for_share(
        self, beneficiary: Account, victim: Account, *, would_hold: float, victim_holds: float, now_s: float,
        price_ms: float = 0.0,
    ) -> bool:  # fmt: skip
        """Within one band an eligible account that stays under its share of HBM may take from one over its own.

        When it has been shut out for as long as its patience: while room comes free by itself, switching only costs.
        And for `worth` times the price: so much was computed meanwhile, and the price is a small part of it.
        Both holdings are parts of HBM: `would_hold` with what it asks for, `victim_holds` as it is.
        """
        first, second = self._states.get(beneficiary), self._states.get(victim)
        if first is None or second is None or first is second or first.band is not second.band:
            return False
        waited_ms = 1e3 * (self.patience_s(beneficiary, now_s) - first.entry_patience_s)
        return (
            self.is_shut_out(beneficiary, now_s)
            and waited_ms >= self.limits.worth * price_ms
            and would_hold <= self.share(beneficiary)
            and victim_holds > self.share(victim)
        )

    def lead(self, account: Account) -> float:
        """Service ahead of its share in milliseconds per weight: larger is deeper in debt."""
        state = self._states.get(account)
        return 0.0 if state is None else -state.deficit_ms / state.weight

    def weight(self, account: Account) -> float:
        """The weight of its tenant."""
        return self._weights.get(account.tenant, self._default_weight)

    def ready_weight(self, band: int) -> float:
        """The weights of all accounts of a band that have dispatchable waiting work. Cost: O(accounts)."""
        found = self._bands.get(band)
        return sum(state.weight for state in found.ready.values()) if found is not None else 0.0

    def take_turned(self) -> set[Account]:
        """Accounts whose eligibility may have changed since the last call."""
        turned, self._turned = self._turned, set()
        return turned

    def standings(self) -> list[Standing]:
        """All accounts that have work or debt."""
        return [
            Standing(one.account, one.weight, one.deficit_ms, one.num_waiting, one.num_running, one.is_barred)
            for one in self._states.values()
        ]

    def check_integrity(self) -> None:
        """Counts, flags and limits agree. Errors: InvariantError."""
        most = self.limits.quantum_ms * (1 + 1e-9)
        for state in self._states.values():
            is_right = (
                state.deficit_ms <= state.weight * most
                and state.is_eligible == (state.deficit_ms > 0)
                and state.is_patient == (state.is_eligible and state.num_ready > 0)
                and (state.account in state.band.ready) == (state.num_ready > 0)
                and (state.account in state.band.working) == state.has_work
                and 0 <= state.num_ready <= state.num_waiting
            )
            if not is_right:
                raise InvariantError("fairness.account", account=state.account)
        for number, band in self._bands.items():
            states = [one for one in self._states.values() if one.band is band]
            num_patient = sum(one.is_patient for one in states)
            overdrawn = {one.account for one in states if one.is_overdrawn}
            if (band.num_patient, band.overdrawn.keys()) != (num_patient, overdrawn):
                raise InvariantError("fairness.band", band=number)

    # the rules that the bound rests on

    def _refill(self, band: _Band, now_s: float) -> None:
        """As many quanta at once as it takes until somebody who waits has deficit again."""
        quantum_ms = self.limits.quantum_ms
        rounds = 1 + min(int(-state.deficit_ms / (state.weight * quantum_ms)) for state in band.ready.values())
        for state in band.working.values():
            most_ms = state.weight * quantum_ms
            state.deficit_ms = min(most_ms, state.deficit_ms + rounds * most_ms)
            self._reflect(state, now_s)
        self.num_refills += 1

    def _clamp(self, state: _State) -> None:
        """Using a machine that nobody else could use is free: no debt grows past D."""
        if len(state.band.ready) == (state.num_ready > 0):
            state.deficit_ms = max(state.deficit_ms, -state.weight * self.limits.debt_ms)

    def _return(self, state: _State, has_work: bool, now_s: float) -> None:
        """From idle: credit is lost, debt is kept. Called before the counts change.

        A sequence that leaves the queue and runs at the same moment makes nobody idle.
        """
        if has_work == state.has_work:
            return
        self._working_weight += state.weight if has_work else -state.weight
        if has_work:
            if now_s > state.idle_from_s:
                state.deficit_ms = min(state.deficit_ms, 0.0)
            state.band.working[state.account] = state
        else:
            del state.band.working[state.account]
            state.idle_from_s = now_s
            self._idle.append(state)

    def _pay(self, account: Account, amount_ms: float, now_s: float) -> None:
        state = self._state(account)
        self.served_ms[account.tenant] = self.served_ms.get(account.tenant, 0.0) + amount_ms
        state.deficit_ms = min(state.deficit_ms - amount_ms, state.weight * self.limits.quantum_ms)
        self._clamp(state)
        self._reflect(state, now_s)
        if not state.has_work and state.deficit_ms >= 0:
            self._idle.append(state)

    def _is_overdue(self, state: _State, now_s: float) -> bool:
        return state.is_overdrawn and state.band.clock_s(now_s) - state.contested_from_s >= self.limits.patience_s

    def _reflect(self, state: _State, now_s: float) -> None:
        """Flags and clocks follow the deficit and the counts."""
        is_eligible = state.deficit_ms > 0
        if is_eligible != state.is_eligible:
            state.is_eligible = is_eligible
            self._turned.add(state.account)
            if is_eligible:
                state.is_barred = False
                state.settled_ms = 0.0
        is_patient = is_eligible and state.num_ready > 0
        if is_patient != state.is_patient:
            state.is_patient = is_patient
            state.band.count(1 if is_patient else -1, now_s)
            if is_patient:
                state.patient_from_s = now_s
            else:
                state.patience_s += now_s - state.patient_from_s
        is_overdrawn = state.deficit_ms < -state.weight * self.limits.debt_ms
        if is_overdrawn != state.is_overdrawn:
            state.is_overdrawn = is_overdrawn
            if is_overdrawn:
                state.band.overdrawn[state.account] = state
            else:
                del state.band.overdrawn[state.account]
            state.contested_from_s = state.band.clock_s(now_s)

    def _state(self, account: Account) -> _State:
        state = self._states.get(account)
        if state is None:
            band = self._bands.setdefault(account.band, _Band())
            state = self._states[account] = _State(account, band, self.weight(account))
        return state

    def _forget_idle(self) -> None:
        """An idle account without debt is as good as a new one."""
        for state in self._idle:
            if state.deficit_ms >= 0 and not state.has_work and self._states.get(state.account) is state:
                del self._states[state.account]
        self._idle.clear()
