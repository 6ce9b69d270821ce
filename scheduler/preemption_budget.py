"""What preemptions may throw away: a budget of repeated work over the last steps."""

from collections import deque

from tiercel.errors import InvariantError
from tiercel.ids import SeqId

WORTH = 20.0
"""A preemption for debt or for a share is worth its price when what it settles is so many times as much.

With 20, at most 5 % of the service that is contested between tenants is spent on switching between them.
"""

LOSS_SHARE = 0.1
"""Work repeated because of preemptions for debt or for a share, at most this part of the useful work of a window."""

PLANNED_SHARE = 0.08
"""The part that preemptions are planned with, so that `LOSS_SHARE` is kept.

Prices are predictions, and what is repeated takes the place of useful work in its window.
"""

WINDOW_STEPS = 1000


class PreemptionBudget:
    """The work that preemptions for debt and for a share have cost, against the useful work of the last steps.

    The price of a preemption is owed from the moment of the preemption until the victim has computed again what it
    lost, and counts for another window of steps after that. A preemption is affordable while everything that is owed
    and everything that was repeated in the window, with its own price, stays within `share` of the useful work of the
    window. A sequence whose price exceeds that is not preempted for debt or for a share at all.

    All amounts are predicted device milliseconds. Cost: constant per step and per preemption.
    """

    def __init__(self, share: float = PLANNED_SHARE, steps: int = WINDOW_STEPS) -> None:
        self.share = share
        self.repeated_ms = 0.0  # since start
        self._steps = steps
        self._useful: deque[float] = deque()  # milliseconds of each of the last steps
        self._useful_ms = 0.0
        self._repeated: deque[tuple[int, float]] = deque()  # number of the step in which it was made up for, price
        self._window_ms = 0.0  # the sum of `_repeated`
        self._owed: dict[SeqId, float] = {}
        self._owed_ms = 0.0
        self._step = 0

    @property
    def left_ms(self) -> float:
        """The largest price that is affordable now."""
        return self.share * self._useful_ms - self._window_ms - self._owed_ms

    @property
    def owes(self) -> bool:
        """Some victim has not yet computed again what it lost."""
        return bool(self._owed)

    def spend(self, seq: SeqId, price_ms: float) -> None:
        """A sequence is preempted for debt or for a share at this price."""
        self._owed[seq] = self._owed.get(seq, 0.0) + price_ms
        self._owed_ms += price_ms

    def make_up(self, seq: SeqId) -> None:
        """The sequence has computed again what it lost, or has ended on the way."""
        price_ms = self._owed.pop(seq, 0.0)
        if price_ms:
            self._owed_ms = self._owed_ms - price_ms if self._owed else 0.0
            self._window_ms += price_ms
            self.repeated_ms += price_ms
            self._repeated.append((self._step, price_ms))

    def launch(self, useful_ms: float) -> None:
        """A step was launched with so much work that had not been done before."""
        self._step += 1
        self._useful.append(useful_ms)
        self._useful_ms += useful_ms
        if len(self._useful) > self._steps:
            self._useful_ms = max(0.0, self._useful_ms - self._useful.popleft())
        while self._repeated and self._repeated[0][0] <= self._step - self._steps:
            self._window_ms -= self._repeated.popleft()[1]
        if not self._repeated:
            self._window_ms = 0.0

    def check_integrity(self) -> None:
        """The sums agree with what they sum up. Errors: InvariantError."""
        sums = (self._useful_ms, self._window_ms, self._owed_ms)
        parts = (sum(self._useful), sum(price for _, price in self._repeated), sum(self._owed.values()))
        if any(abs(one - other) > 1e-6 * (1 + abs(other)) for one, other in zip(sums, parts, strict=True)):
            raise InvariantError("switching.sums", counted=sums, found=parts)
