"""The CPU as a device. The compute lane is one worker thread, so that planning overlaps computing."""

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

from tiercel.clock import Clock
from tiercel.device import memory
from tiercel.device.extents import Extents
from tiercel.device.timer import WallTimer

R = TypeVar("R")


class Done(Generic[R]):
    """A job that has ended successfully."""

    def __init__(self, value: R) -> None:
        self._value = value

    def result(self) -> R:
        return self._value


class Past:
    """A mark of a lane that runs jobs at once."""

    def is_past(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class FutureMark:
    """A mark of a worker's queue: an empty job at its end."""

    def __init__(self, future: "Future[None]") -> None:
        self._future = future

    def is_past(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()


class InlineLane:
    """A lane that runs jobs and copies at once, on the caller's thread. `run` raises the exceptions of the job."""

    depth = 1

    def run(self, job: Callable[[], R]) -> Done[R]:
        return Done(job())

    def copy(self, extents: Extents) -> Done[None]:
        # A fifth faster than torch's copy of one block, and it does not use torch's threads.
        for source, target, size in extents:
            ctypes.memmove(target, source, size)
        return Done(None)

    def mark(self) -> Past:
        return Past()

    def start_timer(self, clock: Clock) -> WallTimer:
        return WallTimer(clock, clock.now_s())

    def is_lost(self, error: Exception) -> bool:
        return False

    def close(self) -> None:
        pass


class CpuLane:
    """A lane of one worker thread. torch's threads do the work, with the GIL released."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self._executor = executor

    def run(self, job: Callable[[], R]) -> "Future[R]":
        return self._executor.submit(job)

    def mark(self) -> FutureMark:
        return FutureMark(self._executor.submit(lambda: None))

    def start_timer(self, clock: Clock) -> WallTimer:
        return WallTimer(clock, clock.now_s())

    def is_lost(self, error: Exception) -> bool:
        return False

    def close(self) -> None:
        self._executor.shutdown(wait=True)


class Unpinned:
    """Host memory of a device that needs no locked memory."""

    slab_bytes = 0
    pinned_bytes = 0

    def start(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass


class CpuDevice:
    """The cores that this process may use."""

    name = "cpu"

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or len(os.sched_getaffinity(0))

    @property
    def processors(self) -> int:
        return self.threads

    @property
    def capability(self) -> None:
        return None

    def open_lane(self) -> CpuLane:
        threads = self.threads
        # torch keeps the number of threads for each thread, so it is set in the lane's thread.
        executor = ThreadPoolExecutor(1, "compute", initializer=lambda: torch.set_num_threads(threads))
        # An executor starts its thread with the first job. A Ctrl-C at that moment leaves a thread that is not joined;
        # if it still computed when the process ends, the process would abort. Therefore the first job is empty.
        executor.submit(lambda: None).result()
        return CpuLane(executor)

    def open_copy_lane(self) -> InlineLane:
        return InlineLane()

    def open_recorder(self) -> None:
        return None

    def pin(self, address: int, size: int, block_bytes: int) -> Unpinned:
        return Unpinned()

    def free_bytes(self) -> int:
        return memory.available_bytes()

    def host_free_bytes(self) -> int:
        return memory.available_bytes()

    def total_bytes(self) -> int:
        return memory.total_bytes()

    def give_back_cached(self) -> None:
        pass

    def reset_peak(self) -> None:
        pass

    def peak_bytes(self) -> int:
        return 0
