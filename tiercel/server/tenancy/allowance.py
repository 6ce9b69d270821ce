"""The part of a tenant's limits that this front may allow until the fronts of a fleet hear of each other again."""

import math


class Allowance:
    """This front's share of what was left of one limit at the last exchange with the other fronts.

    The first request after an exchange may take all that is left, or a limit of one sequence would allow none with two
    fronts. So each front may allow a request too many between two exchanges. Without other fronts there is no limit.
    """

    __slots__ = ("_limit", "_used")

    def __init__(self) -> None:
        self._limit = math.inf
        self._used = 0.0

    def renew(self, limit: float = math.inf) -> None:
        """Begin a time between two exchanges."""
        self._limit, self._used = limit, 0.0

    @property
    def num_left(self) -> int:
        """The whole number that is left of the share; 0 without other fronts."""
        return 0 if self._limit == math.inf else max(0, int(self._limit - self._used))

    def has(self, amount: float) -> bool:
        """Return whether an amount may be allowed, as far as other fronts are concerned."""
        return not self._used or self._used + amount <= self._limit

    def note(self, amount: float) -> None:
        """Note an amount that was allowed."""
        self._used += amount
