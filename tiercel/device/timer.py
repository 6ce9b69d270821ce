"""Measure the time that a device works on a part of a job."""

from typing import Protocol

import torch

from tiercel.values.clock import Clock


class Timer(Protocol):
    """A timer of a part of a job, started by `Lane.start_timer` in the job."""

    def stop(self) -> None:
        """End the part, in the same job, without waiting."""
        ...

    def ms(self) -> float:
        """Return the milliseconds of the part. Call it after the job has a result."""
        ...


class WallTimer:
    """A timer for lanes whose jobs have done their work when they return."""

    def __init__(self, clock: Clock, start_s: float) -> None:
        self._clock = clock
        self._start_s = self._end_s = start_s

    def stop(self) -> None:
        self._end_s = self._clock.now_s()

    def ms(self) -> float:
        return 1e3 * (self._end_s - self._start_s)


class CudaTimer:
    """A timer of two events of a stream. Not run on a GPU yet."""

    def __init__(self, stream: torch.cuda.Stream, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self._stream = stream
        self._start = start
        self._end = end

    def stop(self) -> None:
        self._end.record(self._stream)

    def ms(self) -> float:
        return self._start.elapsed_time(self._end)
