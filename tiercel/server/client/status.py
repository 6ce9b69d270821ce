"""The state of the engine, from loading to its end, and how to wait for a change of it."""

import asyncio
import enum
import math
from collections.abc import Callable

from tiercel.values.clock import Clock
from tiercel.values.errors import TiercelError
from tiercel.wire.frames import Failed, Ready

_MIN_LOAD_STALL_S = 60.0  # without progress of loading
_LOAD_TIMES = 10.0  # a restart may find the weights on a slow disk that the first start found in memory


class EngineState(enum.Enum):
    """The state of the engine process."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"  # it died after it had served; its sequences will be resumed
    FAILED = "failed"  # it could not start, and reported the reason
    DEAD = "dead"  # it is not started again


class EngineStartError(TiercelError):
    """The engine could not start; `message` is the line for the operator."""


class EngineStatus:
    """The state of the engine process as far as it is known. Written by `EngineClient`."""

    def __init__(self, clock: Clock, has_work: Callable[[], bool]) -> None:
        self._clock = clock
        self._has_work = has_work
        self._last_report_s = clock.now_s()
        self._changed = asyncio.Event()
        self.stall_limit_s: Callable[[], float] = lambda: math.inf  # until the server sets it
        self.state = EngineState.LOADING
        self.stage = "starting"  # of loading
        self.ready: Ready | None = None  # once it serves
        self.failure: Failed | None = None  # why it could not start, if it reported the reason

    @property
    def is_over(self) -> bool:
        """True when the engine has failed to start or is dead."""
        return self.state in (EngineState.FAILED, EngineState.DEAD)

    @property
    def is_stalled(self) -> bool:
        """Whether the engine serves and has work, but has ended no step for `stall_limit_s`."""
        return self.state is EngineState.READY and self.silence_s() > self.stall_limit_s()

    @property
    def is_load_stalled(self) -> bool:
        """Whether the next engine has not gone on with loading for far longer than the whole loading took before.

        How long the first engine takes is not known; its operator watches it.
        """
        if self.state is not EngineState.RESTARTING or self.ready is None:
            return False
        return self._clock.now_s() - self._last_report_s > max(_MIN_LOAD_STALL_S, _LOAD_TIMES * self.ready.load_s)

    def silence_s(self) -> float:
        """Return the seconds since the last report while work is pending; 0 when there is no work."""
        return self._clock.now_s() - self._last_report_s if self._has_work() else 0.0

    def note_report(self, now_s: float) -> float:
        """Record that a report came, or that pending work begins. Return the seconds since the report before."""
        since_s, self._last_report_s = now_s - self._last_report_s, now_s
        return since_s

    def notify(self) -> None:
        """Wake the coroutines that wait for a change."""
        self._changed.set()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return when the condition holds. It is evaluated now and after every `notify`."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def wait_ready(self) -> Ready:
        """Return the engine's facts once it serves. Errors: EngineStartError."""
        await self.wait_until(lambda: self.ready is not None or self.is_over)
        if self.ready is not None:
            return self.ready
        if self.state is EngineState.FAILED and self.failure is not None:
            raise EngineStartError(self.failure.code, self.failure.message)
        raise EngineStartError("engine.died", f"the engine died while {self.stage}")

    async def wait_gone(self) -> None:
        """Return when the engine is dead or has failed to start."""
        await self.wait_until(lambda: self.is_over)
