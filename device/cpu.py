"""The CPU as a device: one worker thread is the compute lane, so that planning overlaps computing."""

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
    """A job that has ended well."""

    def __init__(self, value: R) -> None:
        self._value = value

    def result(self) -> R:
        return self._value


class Past:
    """A mark of a lane on which nothing is ever queued."""

    def is_past(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class FutureMark:
    """A mark of a worker's queue: an empty job behind all others."""

    def __init__(self, future: "Future[None]") -> None:
        self._future = future

    def is_past(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()


class InlineLane:
    """Jobs and copies run on the caller's thread, which has nothing better to do. What a job raises, `run` raises."""

    depth = 1

    def run(self, job: Callable[[], R]) -> Done[R]:
        return Done(job())

    def copy(self, extents: Extents) -> Done[None]:
        # A fifth faster than torch's copy for one block, and it never asks torch's threads for help.
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
    """Jobs on one worker thread; torch's own threads do the work and the GIL is free meanwhile."""

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
    """Host memory of a machine that needs none locked."""

    slab_bytes = 0
    pinned_bytes = 0

    def start(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass


class CpuDevice:
    """All cores that this process may use."""

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
        # The number of threads is kept per thread: the lane's own must be told.
        executor = ThreadPoolExecutor(1, "compute", initializer=lambda: torch.set_num_threads(threads))
        # An executor starts its thread with the first job. A Ctrl-C while it does so leaves a thread that nobody waits
        # for: it would still compute when the process ends, which aborts it. This job has nothing to compute.
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
