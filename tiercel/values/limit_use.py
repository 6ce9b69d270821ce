"""The part of a tenant's limits that one front of a fleet has allowed, as fronts tell each other."""

import math

from msgspec import Struct

EXCHANGE_S = 0.5
"""The time between two messages of a front to the others."""

_MOST = 1e15  # limit of each figure: float64 counts exactly below it


class LimitUse(Struct, frozen=True, kw_only=True):
    """The part of one tenant's limits that one front has allowed.

    Totals count from when the tenant became active, so that a message that is lost or comes twice changes nothing.
    """

    life: int = 0  # counts up when totals begin again, as after a change of limits
    requests: float = 0.0  # allowed so far
    tokens: float = 0.0  # charged so far, less what was given back
    num_open: int = 0  # sequences that have not ended
    num_reserved: int = 0  # sequences that it may add before it tells again
    asked: float = 0.0  # recent requests, also refused ones; older ones count less and less
    requests_left: float | None = None  # the part of the limit per minute that is left here; None: no such limit
    tokens_left: float | None = None

    @property
    def is_sane(self) -> bool:
        """Whether all figures are finite, and counts are not negative. A peer may send anything."""
        figures = (self.requests, self.tokens, self.asked, self.requests_left or 0.0, self.tokens_left or 0.0)
        return all(math.isfinite(figure) and abs(figure) < _MOST for figure in figures) and (
            0 <= self.num_open < _MOST and 0 <= self.num_reserved < _MOST and self.asked >= 0
        )
