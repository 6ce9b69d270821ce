"""A token bucket: a limit per minute with a burst of one minute."""

import math

_MINUTE_S = 60.0
_ROUNDING_S = 1e-9  # `take` after exactly `wait_s` seconds must succeed in spite of rounding


class RateBucket:
    """A token bucket whose level follows from one time stamp (GCRA). It starts full and may be overdrawn.

    The bucket has no clock: every method takes `now_s`.
    """

    __slots__ = ("_empty_s", "_per_minute", "_taken")

    def __init__(self, per_minute: float) -> None:
        self._per_minute = per_minute
        self._taken = 0.0
        self._empty_s = -math.inf  # the time at which the bucket was or will be empty, with steady filling

    @property
    def per_minute(self) -> float:
        """The limit per minute, and the capacity."""
        return self._per_minute

    @property
    def taken(self) -> float:
        """The sum of what was taken and returned here; `drain` is not counted."""
        return self._taken

    def left(self, now_s: float) -> float:
        """Return the amount that can be taken now; negative if the bucket is overdrawn."""
        return min(now_s - self._empty_s, _MINUTE_S) * self._per_minute / _MINUTE_S

    def wait_s(self, amount: float, now_s: float) -> float:
        """Return the seconds until an amount can be taken; infinite if it exceeds the capacity."""
        if amount > self._per_minute:
            return math.inf
        return max(self._since_empty(now_s, amount) - now_s, 0.0)

    def full_s(self, now_s: float) -> float:
        """Return the seconds until the bucket is full."""
        return max(self._since_empty(now_s, self._per_minute) - now_s, 0.0)

    def take(self, amount: float, now_s: float) -> bool:
        """Take an amount and return True, or take nothing and return False."""
        if self.wait_s(amount, now_s) > _ROUNDING_S:
            return False
        self.settle(amount, now_s)
        return True

    def settle(self, amount: float, now_s: float) -> None:
        """Take an amount even if it overdraws the bucket; a negative amount is returned to it.

        The bucket never exceeds its capacity, and is never overdrawn by more than one minute's amount.
        """
        self._taken += amount
        self.drain(amount, now_s)

    def drain(self, amount: float, now_s: float) -> None:
        """Lower the level by what was taken elsewhere, as `settle` does."""
        start_s = max(self._empty_s, now_s - _MINUTE_S)
        empty_s = start_s + amount * _MINUTE_S / self._per_minute
        self._empty_s = min(max(empty_s, now_s - _MINUTE_S), now_s + _MINUTE_S)

    def change(self, per_minute: float, now_s: float) -> None:
        """Change the limit. The relative level stays."""
        self._empty_s = max(self._empty_s, now_s - _MINUTE_S)
        self._per_minute = per_minute

    def _since_empty(self, now_s: float, amount: float) -> float:
        return max(self._empty_s, now_s - _MINUTE_S) + amount * _MINUTE_S / self._per_minute


def show_wait(seconds: float) -> str:
    """Return a duration as in OpenAI's rate-limit headers: `0s`, `17ms`, `1.5s`, `6m0s`, `1h0m3s`."""
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
