"""How long a device works on a part of a job."""

from typing import Protocol

import torch

from tiercel.clock import Clock


class Timer(Protocol):
    """Started by `Lane.start_timer`, inside of a job."""

    def stop(self) -> None:
        """Here the part ends; called in the same job. Never waits."""
        ...

    def ms(self) -> float:
        """Milliseconds between the two, to be read once the job has a result."""
        ...


class WallTimer:
    """Of a lane whose jobs have done their work when they return."""

    def __init__(self, clock: Clock, start_s: float) -> None:
        self._clock = clock
        self._start_s = self._end_s = start_s

    def stop(self) -> None:
        self._end_s = self._clock.now_s()

    def ms(self) -> float:
        return 1e3 * (self._end_s - self._start_s)


class CudaTimer:
    """Two events of a stream. Not run on a GPU yet."""

    def __init__(self, stream: torch.cuda.Stream, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self._stream = stream
        self._start = start
        self._end = end

    def stop(self) -> None:
        self._end.record(self._stream)

    def ms(self) -> float:
        return self._start.elapsed_time(self._end)
