"""The service gap between tenants, measured against the bound that the scheduler guarantees."""

from collections.abc import Iterable, Mapping
from itertools import combinations

from tiercel.scheduler.account import Account
from tiercel.scheduler.fairness import TenantBook
from tiercel.values.ids import TenantId


class GapMeter:
    """The largest |dS_i/w_i - dS_j/w_j| of each pair of tenants over any time in which both had work that could run.

    The bound of a pair is that of `FairLimits` for its weights and for the largest price of a preemption for debt
    that the planner considered.

    Cost: one update for each pair of tenants with such work, at each look.
    """

    def __init__(
        self, fair: TenantBook, accounts: Iterable[Account], largest_price_ms: Mapping[Account, float]
    ) -> None:
        self._fair = fair
        self._largest_price_ms = largest_price_ms  # of the account's preemptions for debt
        self._accounts = tuple(accounts)
        self._ranges: dict[tuple[Account, Account], tuple[float, float]] = {}
        self._largest: dict[tuple[Account, Account], float] = {}

    def look(self) -> None:
        """Update the gaps. Call before and after every step, and whenever work may have arrived or ended."""
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
    def widest(self) -> tuple[float, float]:
        """The largest gap and its bound, in milliseconds per weight, of the pair that came closest to its bound."""
        found = ((gap_ms, self._bound_ms(pair)) for pair, gap_ms in self._largest.items())
        return max(found, key=lambda one: one[0] / one[1], default=(0.0, 1.0))

    def _bound_ms(self, pair: tuple[Account, Account]) -> float:
        fair = self._fair
        return sum(
            fair.limits.lead_ms(fair.weight(account), self._largest_price_ms.get(account, 0.0)) for account in pair
        )

    def by_tenant(self) -> dict[TenantId, float]:
        """Return the largest gap of each tenant in milliseconds, 0 without any."""
        gaps = {account.tenant: 0.0 for account in self._accounts}
        for pair, gap_ms in self._largest.items():
            for account in pair:
                gaps[account.tenant] = max(gaps[account.tenant], gap_ms)
        return gaps
