"""How far service drifts from the weights, against the bound that the scheduler promises."""

from collections.abc import Iterable
from itertools import combinations

from scheduler.fairness import Account, FairLimits, TenantBook
from tiercel.ids import TenantId


def bound_ms(limits: FairLimits, least_weight: float) -> float:
    """The most by which two accounts of one band may differ in service by weight while both could be served.

    Source: rule 6 of the design; 2 * (Q + D + (U + tau) / w_min).
    """
    slack_ms = (limits.step_ms + 1e3 * limits.patience_s) / least_weight
    return 2 * (limits.quantum_ms + limits.debt_ms + slack_ms)


class GapMeter:
    """The largest |dS_i/w_i - dS_j/w_j| of each pair over any time in which both had dispatchable work all the while.

    Cost: pairs of those that could be served, each look.
    """

    def __init__(self, fair: TenantBook, accounts: Iterable[Account]) -> None:
        self._fair = fair
        self._accounts = tuple(accounts)
        self._ranges: dict[tuple[Account, Account], tuple[float, float]] = {}
        self._largest: dict[tuple[Account, Account], float] = {}

    def look(self) -> None:
        """Call before and behind every step, and whenever work may have come or gone."""
        fair, served, largest = self._fair, self._fair.served_ms, self._largest
        standing = [
            (account, served.get(account.tenant, 0.0) / fair.weight(account))
            for account in self._accounts
            if fair.is_ready(account)
        ]
        ranges: dict[tuple[Account, Account], tuple[float, float]] = {}
        for (first, first_ms), (second, second_ms) in combinations(standing, 2):
            if first.band != second.band:
                continue
            pair, gap = (first, second), first_ms - second_ms
            low, high = self._ranges.get(pair, (gap, gap))
            if gap < low:
                low = gap
            elif gap > high:
                high = gap
            ranges[pair] = (low, high)
            if high - low > largest.get(pair, 0.0):
                largest[pair] = high - low
        self._ranges = ranges

    @property
    def largest_ms(self) -> float:
        """Of all pairs."""
        return max(self._largest.values(), default=0.0)

    def by_tenant(self) -> dict[TenantId, float]:
        """The largest of each tenant, milliseconds; 0 of one that never could be served beside another."""
        gaps = {account.tenant: 0.0 for account in self._accounts}
        for pair, gap_ms in self._largest.items():
            for account in pair:
                gaps[account.tenant] = max(gaps[account.tenant], gap_ms)
        return gaps
