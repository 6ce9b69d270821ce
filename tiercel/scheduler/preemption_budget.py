"""The budget of preemptions: the work that they may waste, relative to the work of the last steps."""

from collections import deque

from tiercel.values.errors import InvariantError
from tiercel.values.ids import SeqId

WORTH = 20.0
"""A preemption for debt or for a share must settle at least this many times its price.

With 20, at most 5 % of the service that tenants contend for is spent on preemptions.
"""

LOSS_SHARE = 0.1
"""The maximum of the work repeated because of preemptions for debt or for a share, as a part of a window's work."""

PLANNED_SHARE = 0.08
"""The part of a window's work that the planner spends on preemptions, so that `LOSS_SHARE` is kept.

The margin exists because prices are predictions, and because repeated work displaces useful work in its window.
"""

WINDOW_STEPS = 1000


class PreemptionBudget:
    """The price of preemptions for debt and for a share, against the useful work of the last steps.

    The price of a preemption is outstanding until the victim has computed again what it lost, and then counts for
    another window of steps. A preemption is affordable if all outstanding prices, all prices in the window and its own
    price sum to at most `share` of the window's useful work. Sequences with a higher price are not preempted for debt
    or for a share.

    All amounts are predicted milliseconds of device time. Cost: constant per step and per preemption.
    """

    def __init__(self, share: float = PLANNED_SHARE, steps: int = WINDOW_STEPS) -> None:
        self.share = share
        self._steps = steps
        self._useful: deque[float] = deque()  # milliseconds, by step of the window
        self._useful_ms = 0.0
        self._repeated: deque[tuple[int, float]] = deque()  # (step at which the victim caught up, price)
        self._window_ms = 0.0  # sum of the prices in `_repeated`
        self._outstanding: dict[SeqId, float] = {}
        self._outstanding_ms = 0.0
        self._step = 0

    @property
    def left_ms(self) -> float:
        """The largest price that is affordable now."""
        return self.share * self._useful_ms - self._window_ms - self._outstanding_ms

    @property
    def has_outstanding(self) -> bool:
        """Whether a victim has not yet computed again what it lost."""
        return bool(self._outstanding)

    def spend(self, seq: SeqId, price_ms: float) -> None:
        """Record that a sequence is preempted for debt or for a share at this price."""
        self._outstanding[seq] = self._outstanding.get(seq, 0.0) + price_ms
        self._outstanding_ms += price_ms

    def catch_up(self, seq: SeqId) -> None:
        """Record that the sequence has computed again what it lost, or has ended."""
        price_ms = self._outstanding.pop(seq, 0.0)
        if price_ms:
            self._outstanding_ms = self._outstanding_ms - price_ms if self._outstanding else 0.0
            self._window_ms += price_ms
            self._repeated.append((self._step, price_ms))

    def launch(self, useful_ms: float) -> None:
        """Record a launched step with its useful work: the work that was not done before."""
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
        """Check the running sums. Errors: InvariantError."""
        sums = (self._useful_ms, self._window_ms, self._outstanding_ms)
        parts = (sum(self._useful), sum(price for _, price in self._repeated), sum(self._outstanding.values()))
        if any(abs(one - other) > 1e-6 * (1 + abs(other)) for one, other in zip(sums, parts, strict=True)):
            raise InvariantError("switching.sums", counted=sums, found=parts)
