"""A limit of so much a minute, with a minute's worth at once."""

import math

_MINUTE_S = 60.0
_ROUNDING_S = 1e-9  # `take` after exactly `wait_s` seconds must succeed in spite of rounding


class RateBucket:
    """A token bucket in the form of GCRA: one time says how full it is. Starts full; may be overdrawn.

    `now_s` is passed in: a bucket has no clock and no timer.
    """

    __slots__ = ("_empty_s", "_per_minute")

    def __init__(self, per_minute: float) -> None:
        self._per_minute = per_minute
        self._empty_s = -math.inf  # when it would have been empty, had it filled evenly since

    @property
    def per_minute(self) -> float:
        """The limit, and what fits."""
        return self._per_minute

    def left(self, now_s: float) -> float:
        """What could be taken now; negative when it is overdrawn."""
        return min(now_s - self._empty_s, _MINUTE_S) * self._per_minute / _MINUTE_S

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until so much can be taken; 0 = now. More than fits never can: infinite."""
        if amount > self._per_minute:
            return math.inf
        return max(self._since_empty(now_s, amount) - now_s, 0.0)

    def full_s(self, now_s: float) -> float:
        """Seconds until it is full."""
        return max(self._since_empty(now_s, self._per_minute) - now_s, 0.0)

    def take(self, amount: float, now_s: float) -> bool:
        """Take so much, or nothing and False."""
        if self.wait_s(amount, now_s) > _ROUNDING_S:
            return False
        self.settle(amount, now_s)
        return True

    def settle(self, amount: float, now_s: float) -> None:
        """Take so much whether it is there or not; a negative amount is given back.

        It is never more than full, and never overdrawn by more than a minute's worth.
        """
        start_s = max(self._empty_s, now_s - _MINUTE_S)
        empty_s = start_s + amount * _MINUTE_S / self._per_minute
        self._empty_s = min(max(empty_s, now_s - _MINUTE_S), now_s + _MINUTE_S)

    def change(self, per_minute: float, now_s: float) -> None:
        """Another limit from now on: as full as before, in shares of the whole."""
        self._empty_s = max(self._empty_s, now_s - _MINUTE_S)
        self._per_minute = per_minute

    def _since_empty(self, now_s: float, amount: float) -> float:
        return max(self._empty_s, now_s - _MINUTE_S) + amount * _MINUTE_S / self._per_minute


def show_wait(seconds: float) -> str:
    """A duration as OpenAI's rate-limit headers spell it: `0s`, `17ms`, `1.5s`, `6m0s`, `1h0m3s`."""
    if seconds <= 0:
        return "0s"
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds * 1000) / 1000, 60)
    hours, minutes = divmod(int(minutes), 60)
    text = f"{round(rest, 3):g}s"
    if minutes or hours:
        text = f"{minutes}m{text}"
    return f"{hours}h{text}" if hours else text
