"""The level of reduced service under overload, for tenants that allow it."""

import enum

from tiercel.values.clock import Clock

_RAISE_AT = (0.5, 0.8)  # pressure from which FULL and SHORTENED are raised
_LOWER_BELOW = (0.3, 0.6)  # pressure below which SHORTENED and DEFERRED are lowered
_RAISE_S = 0.5  # time that pressure must last before the level is raised
_CALM_S = 5.0  # time that calm must last before the level is lowered


class OverloadLevel(enum.IntEnum):
    """A level of reduced service. It includes the reductions of the levels before it."""

    FULL = 0
    SHORTENED = 1  # fewer output tokens
    DEFERRED = 2  # a later band as well


class OverloadControl:
    """Reduced service under overload, with hysteresis.

    The level rises by one while pressure lasts and falls by one while calm lasts. Pressure is the load relative to the
    capacity: 0 = idle, 1 = overload. The controller has no timer; readings drive it.
    Source: Learned Best-Effort LLM Serving (arXiv 2401.07886), with fixed rules in place of the learned policy.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._level = OverloadLevel.FULL
        self._high_since_s: float | None = None
        self._low_since_s: float | None = None
        self._read_s = clock.now_s()

    def feed(self, pressure: float) -> OverloadLevel:
        """Update the level with a reading of the pressure, and return it.

        After a pause in the readings of at least the calm time, a low reading counts as calm, and high readings before
        and after the pause do not count as lasting pressure.
        """
        now_s = self._clock.now_s()
        if now_s - self._read_s >= _CALM_S:
            if self._is_low(pressure):
                self._level = OverloadLevel.FULL if pressure < _LOWER_BELOW[0] else OverloadLevel(self._level - 1)
            self._high_since_s = self._low_since_s = None
        self._read_s = now_s
        self._high_since_s = self._since(self._high_since_s, now_s, is_true=self._is_high(pressure))
        self._low_since_s = self._since(self._low_since_s, now_s, is_true=self._is_low(pressure))
        if self._high_since_s is not None and now_s - self._high_since_s >= _RAISE_S:
            self._move(1)
        elif self._low_since_s is not None and now_s - self._low_since_s >= _CALM_S:
            self._move(-1)
        return self._level

    def _is_high(self, pressure: float) -> bool:
        return self._level < OverloadLevel.DEFERRED and pressure >= _RAISE_AT[self._level]

    def _is_low(self, pressure: float) -> bool:
        return self._level > OverloadLevel.FULL and pressure < _LOWER_BELOW[self._level - 1]

    def _since(self, since_s: float | None, now_s: float, *, is_true: bool) -> float | None:
        if not is_true:
            return None
        return now_s if since_s is None else since_s

    def _move(self, levels: int) -> None:
        self._level = OverloadLevel(self._level + levels)
        self._high_since_s = self._low_since_s = None  # the next change is timed from now
