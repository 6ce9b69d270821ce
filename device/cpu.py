"""The CPU as a device: one worker thread is the compute lane, so that planning overlaps computing."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

from device import memory

R = TypeVar("R")


class Done(Generic[R]):
    """A job that has ended well."""

    def __init__(self, value: R) -> None:
        self._value = value

    def result(self) -> R:
        return self._value


class InlineLane:
    """Jobs run on the caller's thread, which has nothing better to do. What a job raises, `run` raises."""

    def run(self, job: Callable[[], R]) -> Done[R]:
        return Done(job())

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

    def is_lost(self, error: Exception) -> bool:
        return False

    def close(self) -> None:
        self._executor.shutdown(wait=True)


class CpuDevice:
    """All cores that this process may use."""

    name = "cpu"

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or len(os.sched_getaffinity(0))

    def open_lane(self) -> CpuLane:
        threads = self.threads
        # The number of threads is kept per thread: the lane's own must be told.
        return CpuLane(ThreadPoolExecutor(1, "compute", initializer=lambda: torch.set_num_threads(threads)))

    def open_copy_lane(self) -> InlineLane:
        return InlineLane()

    def pin(self, address: int, size: int) -> None:
        pass

    def free_bytes(self) -> int:
        return memory.available_bytes()

    def host_free_bytes(self) -> int:
        return memory.available_bytes()

    def total_bytes(self) -> int:
        return memory.total_bytes()
