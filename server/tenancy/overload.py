"""Cheaper service under overload, for tenants that allow it: rungs with hysteresis."""

import enum

from tiercel.clock import Clock

_CLIMB_AT = (0.5, 0.8)  # pressure from which the next level is taken, from FULL and from SHORTENED
_LEAVE_BELOW = (0.3, 0.6)  # pressure below which SHORTENED and DEFERRED are left
_CLIMB_S = 0.5  # pressure must last so long for a level upwards
_CALM_S = 5.0  # and calm so long for a level downwards


class OverloadLevel(enum.IntEnum):
    """How far service is reduced. A level includes those before it."""

    FULL = 0
    SHORTENED = 1  # fewer output tokens
    DEFERRED = 2  # a later band as well


class OverloadControl:
    """One level at a time, up when pressure lasts, down when calm lasts. Fed with readings; owns no timer.

    Pressure is a share of what the server can promise: 0 = idle, 1 = overload.
    Source: Learned Best-Effort LLM Serving (arXiv 2401.07886), with rules in place of the learned policy.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._level = OverloadLevel.FULL
        self._high_since_s: float | None = None
        self._low_since_s: float | None = None
        self._read_s = clock.now_s()

    @property
    def level(self) -> OverloadLevel:
        """The present one."""
        return self._level

    def feed(self, pressure: float) -> OverloadLevel:
        """A reading; returns the level after it.

        A low one after a silence as long as calm must last is calm; two high ones on both sides of it are no pressure.
        """
        now_s = self._clock.now_s()
        if now_s - self._read_s >= _CALM_S:
            if self._is_low(pressure):
                self._level = OverloadLevel.FULL if pressure < _LEAVE_BELOW[0] else OverloadLevel(self._level - 1)
            self._high_since_s = self._low_since_s = None
        self._read_s = now_s
        self._high_since_s = self._since(self._high_since_s, now_s, is_true=self._is_high(pressure))
        self._low_since_s = self._since(self._low_since_s, now_s, is_true=self._is_low(pressure))
        if self._high_since_s is not None and now_s - self._high_since_s >= _CLIMB_S:
            self._move(1)
        elif self._low_since_s is not None and now_s - self._low_since_s >= _CALM_S:
            self._move(-1)
        return self._level

    def _is_high(self, pressure: float) -> bool:
        return self._level < OverloadLevel.DEFERRED and pressure >= _CLIMB_AT[self._level]

    def _is_low(self, pressure: float) -> bool:
        return self._level > OverloadLevel.FULL and pressure < _LEAVE_BELOW[self._level - 1]

    def _since(self, since_s: float | None, now_s: float, *, is_true: bool) -> float | None:
        if not is_true:
            return None
        return now_s if since_s is None else since_s

    def _move(self, rungs: int) -> None:
        self._level = OverloadLevel(self._level + rungs)
        self._high_since_s = self._low_since_s = None  # the next level takes its own time
