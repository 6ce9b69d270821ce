"""The CPU as a device. The compute lane is one worker thread, so that planning overlaps computing."""

import ctypes
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

from tiercel.device import memory
from tiercel.device.contention import KernelContention, name_thread
from tiercel.device.extents import Extents
from tiercel.device.processors import cpu_quota, default_threads, show_cores, usable_cores
from tiercel.device.team import Team
from tiercel.device.timer import WallTimer
from tiercel.values.clock import Clock, MonotonicClock

log = logging.getLogger(__name__)

_TEAM_NAME = "compute"  # of the lane's thread and of the OpenMP threads that it creates

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
    """A lane of one worker thread. The team of OpenMP threads does the work, with the GIL released.

    torch and the native library use the same OpenMP runtime, and thus the same team.
    """

    def __init__(self, executor: ThreadPoolExecutor, threads: int, team: Team | None = None) -> None:
        """`threads`: number of threads on a quiet machine; `team`: None if it is fixed."""
        self._executor = executor
        self._threads = threads
        self._team = team

    @property
    def threads(self) -> int:
        """The number of threads that compute together at present."""
        return self._threads if self._team is None else self._team.width

    def run(self, job: Callable[[], R]) -> "Future[R]":
        if self._team is None:
            return self._executor.submit(job)
        return self._executor.submit(self._run_in_team, job, self._team)

    def _run_in_team(self, job: Callable[[], R], team: Team) -> R:
        team.begin()
        try:
            return job()
        finally:
            if team.end():
                torch.set_num_threads(team.width)
                log.debug("team width=%d", team.width)

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

    def __init__(self, threads: int | None = None, *, adapts: bool = True) -> None:
        """`threads`: compute threads; by default one for each core that this process may use.

        `adapts`: whether the team computes with fewer threads while other processes use the cores.
        """
        self._adapts = adapts
        self._cores = usable_cores()
        self._quota = cpu_quota()
        self.threads = threads or default_threads(self._cores, self._quota)

    @property
    def processors(self) -> int:
        return self.threads

    @property
    def capability(self) -> None:
        return None

    @property
    def maps_host_memory(self) -> bool:
        return False

    def open_lane(self) -> CpuLane:
        threads, room = self.threads, default_threads(self._cores, self._quota)
        log.info(
            "threads count=%d cores=%s quota=%s",
            threads,
            show_cores(self._cores),
            "none" if self._quota is None else f"{self._quota:g}",
        )
        if threads > room:
            log.warning("more threads than cores threads=%d room=%d: set --threads to %d or less", threads, room, room)

        def start() -> None:
            # torch keeps the number of threads for each thread, so it is set in the lane's thread.
            torch.set_num_threads(threads)
            name_thread(_TEAM_NAME)

        executor = ThreadPoolExecutor(1, _TEAM_NAME, initializer=start)
        # An executor starts its thread with the first job. A Ctrl-C at that moment leaves a thread that is not joined;
        # if it still computed when the process ends, the process would abort. Therefore the first job is empty.
        executor.submit(lambda: None).result()
        if threads == 1 or not self._adapts:
            return CpuLane(executor, threads)
        return CpuLane(executor, threads, Team(threads, KernelContention(_TEAM_NAME, self._cores), MonotonicClock()))

    def open_copy_lane(self) -> InlineLane:
        return InlineLane()

    def open_fork(self) -> None:
        """Return None: the lane's threads have all cores."""

    def open_recorder(self) -> None:
        return None

    def pin(self, address: int, size: int, block_bytes: int) -> Unpinned:
        return Unpinned()

    def free_bytes(self) -> int:
        return memory.available_bytes()

    def host_free_bytes(self) -> int:
        return memory.available_bytes()

    def host_limit(self) -> str:
        return memory.tightest().limit

    def total_bytes(self) -> int:
        return memory.total_bytes()

    def give_back_cached(self) -> None:
        pass

    def reset_peak(self) -> None:
        pass

    def peak_bytes(self) -> int:
        return 0
