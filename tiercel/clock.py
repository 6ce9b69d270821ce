"""Time as a dependency: rooms are handed a clock and never ask the module `time`."""

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds. The zero is arbitrary but the same for all processes of one machine."""

    def now_s(self) -> float: ...


class MonotonicClock:
    """The machine's CLOCK_MONOTONIC, which does not jump with the wall clock."""

    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves when it is told to; for tests and simulations."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds
