"""The rules by which an account that is owed service, or holds too little HBM, may preempt others of its band."""

from tiercel.scheduler.account import Account
from tiercel.scheduler.fairness import NoFairness, TenantBook


class PreemptionRules:
    """Decides which accounts may be preempted for debt and for a share. Reads the book of deficits, never writes."""

    def __init__(self, book: TenantBook | NoFairness) -> None:
        self._book = book

    def may_preempt_for_debt(
        self, beneficiary: Account, victim: Account, now_s: float, *, price_ms: float = 0.0
    ) -> bool:
        """Return whether one account may preempt another account of its band for the other's debt.

        The beneficiary must be eligible with dispatchable work, and the victim's debt must exceed D. Also, either the
        beneficiary's patience is over, or the victim has been overdrawn for that long while any account waited: a
        series of impatient newcomers must not shield a debtor. The debt beyond D must be `worth` times the price of
        the preemption, so that preemptions cost a small part of what they settle.
        """
        first, second = self._book.state(beneficiary), self._book.state(victim)
        if first is None or second is None or first.band is not second.band:
            return False
        if not first.is_patient or not second.is_overdrawn:
            return False
        limits = self._book.limits
        beyond_ms = -second.deficit_ms - second.weight * limits.debt_ms
        if price_ms > 0 and beyond_ms < second.settled_ms + limits.worth * price_ms:
            return False
        return first.elapsed_patience_s(now_s) >= limits.patience_s or self._book.is_overdue(second, now_s)

    def debtors(self, creditor: Account, now_s: float) -> frozenset[Account]:
        """Return the accounts that this account may preempt for debt."""
        overdrawn = self._book.overdrawn(creditor.band)
        return frozenset(one for one in overdrawn if self.may_preempt_for_debt(creditor, one, now_s))

    def is_shut_out(self, account: Account, now_s: float) -> bool:
        """Return whether the account was eligible and dispatchable for its patience without an admission."""
        state = self._book.state(account)
        if state is None or not state.is_patient:
            return False
        return state.elapsed_patience_s(now_s) - state.entry_patience_s >= self._book.limits.patience_s

    def may_preempt_for_share(
        self, beneficiary: Account, victim: Account, *, would_hold: float, victim_holds: float, now_s: float,
        price_ms: float = 0.0,
    ) -> bool:  # fmt: skip
        """Return whether an account below its share of HBM may preempt an account of its band above its share.

        The beneficiary must be shut out: as long as it is admitted without preemptions, these would only cost. It must
        also have waited for `worth` times the price, so that the price is a small part of what was computed meanwhile.
        Both holdings are parts of all HBM: `would_hold` includes the blocks that the beneficiary asks for.
        """
        first, second = self._book.state(beneficiary), self._book.state(victim)
        if first is None or second is None or first is second or first.band is not second.band:
            return False
        waited_ms = 1e3 * (first.elapsed_patience_s(now_s) - first.entry_patience_s)
        return (
            self.is_shut_out(beneficiary, now_s)
            and waited_ms >= self._book.limits.worth * price_ms
            and would_hold <= self._book.share(beneficiary)
            and victim_holds > self._book.share(victim)
        )

    def payer(self, owner: Account, beneficiary: Account | None) -> Account:
        """Return the account that pays for computing again what a preemption discarded.

        The account on whose behalf the sequence was preempted pays, unless it is overdrawn or has ended.
        """
        state = self._book.state(beneficiary) if beneficiary is not None else None
        return owner if state is None or state.is_overdrawn else state.account
