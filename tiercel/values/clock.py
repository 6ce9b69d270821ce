"""Clocks that are passed as a dependency, so that rooms do not use the module `time`."""

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds. The zero is arbitrary, but the same for all processes of one machine."""

    def now_s(self) -> float: ...


class MonotonicClock:
    """CLOCK_MONOTONIC of the machine, which is independent of changes to the wall clock."""

    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that is advanced explicitly, for tests and simulations."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds
