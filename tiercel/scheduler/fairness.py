"""The deficits behind the fairness gate: how much service each account is owed. Time is a parameter."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tiercel.scheduler.account import Account, AccountState, BandState
from tiercel.scheduler.fairness_limits import FairLimits, fair_limits
from tiercel.values.errors import InvariantError
from tiercel.values.ids import TenantId


class Charge(NamedTuple):
    """The predicted charge of a launched step, until the step's time is measured."""

    predicted_ms: float
    shares: tuple[tuple[Account, float], ...]  # milliseconds; they sum to `predicted_ms`


NO_CHARGE = Charge(0.0, ())


class NoFairness:
    """Takes the place of the TenantBook under the policies `priority` and `fcfs`: every account is always eligible."""

    limits = fair_limits(0.0)
    has_debtors = False

    def __init__(self, served_ms: dict[TenantId, float] | None = None) -> None:
        self.served_ms = {} if served_ms is None else served_ms  # by the policy before, kept for the policy after

    def set_weights(self, weights: Mapping[TenantId, float], now_s: float) -> None: ...
    def set_weight(self, tenant: TenantId, weight: float, now_s: float) -> None: ...
    def set_limits(self, limits: FairLimits, now_s: float) -> None: ...
    def wait(self, account: Account, num_waiting: int, num_ready: int, now_s: float) -> None: ...
    def run(self, account: Account, num_running: int, now_s: float) -> None: ...
    def refill(self, now_s: float) -> None: ...
    def settle(self, charge: Charge, measured_ms: float, now_s: float) -> None: ...
    def bar(self, victim: Account, price_ms: float = 0.0) -> None: ...
    def check_integrity(self) -> None: ...

    def charge(self, shares: Mapping[Account, float], now_s: float) -> Charge:
        return NO_CHARGE

    def state(self, account: Account) -> AccountState | None:
        return None

    def overdrawn(self, band: int) -> Iterable[Account]:
        return ()

    def is_overdue(self, state: AccountState, now_s: float) -> bool:
        return False

    def is_eligible(self, account: Account) -> bool:
        return True

    def is_ready(self, account: Account) -> bool:
        return False

    def may_admit(self, account: Account, now_s: float) -> bool:
        return True

    def may_age(self, account: Account) -> bool:
        return True

    def share(self, account: Account) -> float:
        return 1.0

    def lead(self, account: Account) -> float:
        return 0.0

    def weight(self, account: Account) -> float:
        return 1.0

    def ready_weight(self, band: int) -> float:
        return 0.0

    def take_changed(self) -> set[Account]:
        return set()


class TenantBook:
    """The deficits of all accounts. The only writer of which accounts are eligible, in debt or barred.

    Inside a band, accounts with deficit left go before accounts without. The predicted milliseconds of each step are
    charged to the accounts that it serves, and corrected by the measured time. When every account with dispatchable
    waiting work has spent its deficit, every account with any work gets a quantum times its weight.

    Cost: constant per account touched; a refill visits all accounts of the band.
    """

    def __init__(
        self, limits: FairLimits, weights: Mapping[TenantId, float] | None = None,
        served_ms: dict[TenantId, float] | None = None,
    ) -> None:  # fmt: skip
        self.limits = limits
        self.served_ms = {} if served_ms is None else served_ms  # charged since start
        self.num_refills = 0
        self._weights: dict[TenantId, float] = {}  # of tenants whose weight is set; 1 for others
        self._states: dict[Account, AccountState] = {}
        self._bands: dict[int, BandState] = {}
        self._working_weight = 0.0
        self._changed: set[Account] = set()
        self._idle: list[AccountState] = []  # had neither work nor debt when they were listed
        self.set_weights(weights or {}, 0.0)

    # ---- events

    def set_weights(self, weights: Mapping[TenantId, float], now_s: float) -> None:
        """Set the weights of all tenants; accounts keep their deficit per weight. Tenants that are left out have 1.

        Errors: InvariantError if a weight is not a positive number.
        """
        if any(not 0 < weight < float("inf") for weight in weights.values()):
            raise InvariantError("fairness.weight")
        self._weights = dict(weights)
        self._reweigh(self._states.values(), now_s)

    def set_weight(self, tenant: TenantId, weight: float, now_s: float) -> None:
        """Set the weight of one tenant; its accounts keep their deficit per weight."""
        self._weights[tenant] = weight
        self._reweigh(filter(None, (self._states.get(Account(band, tenant)) for band in self._bands)), now_s)

    def set_limits(self, limits: FairLimits, now_s: float) -> None:
        """Set new limits, for example for a new longest step. Deficits are cut to the new quantum."""
        self.limits = limits
        for state in self._states.values():
            state.deficit_ms = min(state.deficit_ms, state.weight * limits.quantum_ms)
            self._update(state, now_s)

    def wait(self, account: Account, num_waiting: int, num_ready: int, now_s: float) -> None:
        """Set the number of the account's waiting sequences, and of those among them that are dispatchable.

        A sequence is dispatchable if only capacity (blocks, a row, budget) keeps it from a slice. Sequences that are
        being restored, or whose prefix another sequence computes, are not. An unfinished prefill waits, too.
        """
        state = self._open(account)
        self._change_work(state, num_waiting > 0 or state.num_running > 0, now_s)
        state.num_waiting, state.num_ready = num_waiting, num_ready
        if num_ready:
            state.band.ready[account] = state
        else:
            state.band.ready.pop(account, None)
        self._update(state, now_s)
        if not num_waiting:
            state.patience_s = state.entry_patience_s = 0.0

    def run(self, account: Account, num_running: int, now_s: float) -> None:
        """Set the number of the account's sequences that hold blocks."""
        state = self._open(account)
        self._change_work(state, num_running > 0 or state.num_waiting > 0, now_s)
        if num_running > state.num_running:
            state.entry_patience_s = state.elapsed_patience_s(now_s)
        state.num_running = num_running
        self._update(state, now_s)

    def refill(self, now_s: float) -> None:
        """Begin a plan: refill every band in which no account with dispatchable waiting work has deficit left."""
        self._forget_idle()
        for band in self._bands.values():
            if band.ready and not band.num_patient:
                self._refill(band, now_s)

    def charge(self, shares: Mapping[Account, float], now_s: float) -> Charge:
        """Charge the predicted milliseconds of a launched step to the accounts that it serves."""
        for account, share_ms in shares.items():
            self._pay(account, share_ms, now_s)
        return Charge(sum(shares.values()), tuple(shares.items()))

    def settle(self, charge: Charge, measured_ms: float, now_s: float) -> None:
        """Correct a charge in proportion to the measured time. 0 gives the charge of a void step back.

        Time beyond the longest step is not charged to any account.
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
        """Record that a sequence of the account was preempted for debt.

        None of the account's sequences is admitted while an eligible account waits. The debt that was worth the price
        of this preemption justifies no other one.
        """
        state = self._open(victim)
        state.is_barred = True
        state.settled_ms += self.limits.worth * price_ms

    # ---- queries

    @property
    def has_debtors(self) -> bool:
        """Whether any account has a debt beyond D."""
        return any(band.overdrawn for band in self._bands.values())

    def state(self, account: Account) -> AccountState | None:
        """Return the state of an account, to read; None if it has neither work nor debt."""
        return self._states.get(account)

    def overdrawn(self, band: int) -> Iterable[Account]:
        """Return the accounts of a band that have a debt beyond D."""
        state = self._bands.get(band)
        return () if state is None else state.overdrawn

    def is_overdue(self, state: AccountState, now_s: float) -> bool:
        """Return whether the account has been overdrawn for the patience while others were eligible and waited."""
        return state.is_overdrawn and state.band.clock_s(now_s) - state.contested_from_s >= self.limits.patience_s

    def is_eligible(self, account: Account) -> bool:
        """Return whether the account has deficit left."""
        state = self._states.get(account)
        return state is not None and state.is_eligible

    def is_ready(self, account: Account) -> bool:
        """Return whether the account has dispatchable waiting work."""
        state = self._states.get(account)
        return state is not None and state.num_ready > 0

    def may_admit(self, account: Account, now_s: float) -> bool:
        """Return False if a sequence of the account would be preempted for debt at once."""
        state = self._states.get(account)
        if state is None or not state.band.num_patient or not (state.is_barred or state.is_overdrawn):
            return True
        return not (state.is_barred or self.is_overdue(state, now_s))

    def may_age(self, account: Account) -> bool:
        """Return False if the account waits because of its own debt, so that the aging share is not for it."""
        state = self._states.get(account)
        return state is None or not (state.is_overdrawn and state.band.num_patient)

    def share(self, account: Account) -> float:
        """Return the account's share of HBM: its weight among all accounts with work, in all bands."""
        state = self._states.get(account)
        weight = self.weight(account) if state is None else state.weight
        total = self._working_weight + (weight if state is None or not state.has_work else 0.0)
        return weight / total

    def lead(self, account: Account) -> float:
        """Return the account's lead over its share in milliseconds per weight. A larger lead is a deeper debt."""
        state = self._states.get(account)
        return 0.0 if state is None else -state.deficit_ms / state.weight

    def weight(self, account: Account) -> float:
        """Return the weight of the account's tenant."""
        return self._weights.get(account.tenant, 1.0)

    def ready_weight(self, band: int) -> float:
        """Return the sum of the weights of a band's accounts with dispatchable waiting work. Cost: O(accounts)."""
        state = self._bands.get(band)
        return sum(one.weight for one in state.ready.values()) if state is not None else 0.0

    def take_changed(self) -> set[Account]:
        """Return the accounts whose eligibility may have changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def check_integrity(self) -> None:
        """Check counts, flags and limits. Errors: InvariantError."""
        max_deficit_ms = self.limits.quantum_ms * (1 + 1e-9)
        for state in self._states.values():
            is_right = (
                state.deficit_ms <= state.weight * max_deficit_ms
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

    # ---- the rules that the bound on service rests on

    def _refill(self, band: BandState, now_s: float) -> None:
        """Add quanta to all accounts with work, until an account with dispatchable waiting work has deficit left."""
        quantum_ms = self.limits.quantum_ms
        rounds = 1 + min(int(-state.deficit_ms / (state.weight * quantum_ms)) for state in band.ready.values())
        for state in band.working.values():
            max_ms = state.weight * quantum_ms
            state.deficit_ms = min(max_ms, state.deficit_ms + rounds * max_ms)
            self._update(state, now_s)
        self.num_refills += 1

    def _clamp(self, state: AccountState) -> None:
        """Limit the debt to D if no other account could use the machine."""
        if len(state.band.ready) == (state.num_ready > 0):
            state.deficit_ms = max(state.deficit_ms, -state.weight * self.limits.debt_ms)

    def _change_work(self, state: AccountState, has_work: bool, now_s: float) -> None:
        """Note that the account gets or loses its last work. Call before its counts change.

        An account that returns from idle loses its deficit and keeps its debt. An account is not idle if its last
        sequence leaves the queue and runs at the same moment.
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
        state = self._open(account)
        self.served_ms[account.tenant] = self.served_ms.get(account.tenant, 0.0) + amount_ms
        state.deficit_ms = min(state.deficit_ms - amount_ms, state.weight * self.limits.quantum_ms)
        self._clamp(state)
        self._update(state, now_s)
        if not state.has_work and state.deficit_ms >= 0:
            self._idle.append(state)

    def _reweigh(self, states: Iterable[AccountState], now_s: float) -> None:
        for state in states:
            weight = self.weight(state.account)
            self._working_weight += weight - state.weight if state.has_work else 0.0
            state.deficit_ms *= weight / state.weight
            state.weight = weight
            self._update(state, now_s)

    def _update(self, state: AccountState, now_s: float) -> None:
        """Update flags and clocks after a change of the deficit or of the counts."""
        is_eligible = state.deficit_ms > 0
        if is_eligible != state.is_eligible:
            state.is_eligible = is_eligible
            self._changed.add(state.account)
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

    def _open(self, account: Account) -> AccountState:
        state = self._states.get(account)
        if state is None:
            band = self._bands.setdefault(account.band, BandState())
            state = self._states[account] = AccountState(account, band, self.weight(account))
        return state

    def _forget_idle(self) -> None:
        """Drop idle accounts without debt, which are equal to new ones."""
        for state in self._idle:
            if state.deficit_ms >= 0 and not state.has_work and self._states.get(state.account) is state:
                del self._states[state.account]
        self._idle.clear()
