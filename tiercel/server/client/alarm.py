"""A call at a time of a clock."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tiercel.values.clock import Clock


class Alarm:
    """Calls `ring` once on the running event loop, at or after `at_s` of the clock. Leaving the `with` cancels it."""

    __slots__ = ("_at_s", "_clock", "_ring", "_timer")

    def __init__(self, clock: Clock, at_s: float, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._at_s = at_s
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self.set()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def set(self) -> None:
        """Start waiting. If the time has passed already, the call is made in the next turn of the event loop."""
        left_s = self._at_s - self._clock.now_s()
        self._timer = asyncio.get_running_loop().call_later(max(left_s, 0.0), self._check)

    def cancel(self) -> None:
        """Do not call any more. May be called at any time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        if self._clock.now_s() < self._at_s:  # the timer of the event loop is rounded, and a test may hold the clock
            self.set()
            return
        self._timer = None
        self._ring()
