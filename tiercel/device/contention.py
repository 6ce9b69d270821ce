"""The time that threads of this process wait for a core, and the time that cores are idle, as the kernel counts them.

https://docs.kernel.org/scheduler/sched-stats.html and https://docs.kernel.org/filesystems/proc.html#proc-stat
"""

import ctypes
import os
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

_PR_SET_NAME = 15
_NS = 1e-9


def name_thread(name: str) -> None:
    """Set the kernel's name of the calling thread, at most 15 bytes. Threads that it creates inherit the name."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


class Contention(Protocol):
    """The source of the two times. Each call returns the time since the call before, in seconds."""

    def waited_s(self) -> float | None:
        """Time that the team's threads were ready to run and had no core, summed over threads; None if unknown."""
        ...

    def idle_s(self) -> float | None:
        """Idle time of the cores, summed over cores; None if unknown."""
        ...


class KernelContention:
    """Reads both times from /proc. The first call of each method returns a meaningless number."""

    def __init__(self, thread_name: str, cores: Collection[int], proc: Path = Path("/proc")) -> None:
        """`thread_name`: the kernel's name of the threads that count."""
        self._name = thread_name
        self._cores = frozenset(f"cpu{core}" for core in cores)
        self._proc = proc
        self._waited_ns_by_thread: dict[str, int] = {}
        self._strangers: set[str] = set()  # threads of other names
        self._idle_ticks = 0
        self._tick_s = 1 / os.sysconf("SC_CLK_TCK")

    def waited_s(self) -> float | None:
        tasks = self._proc / "self" / "task"
        before, after = self._waited_ns_by_thread, dict[str, int]()
        try:
            threads = os.listdir(tasks)
        except OSError:
            return None
        for thread in threads:
            if thread in self._strangers:
                continue
            try:
                if thread not in before and (tasks / thread / "comm").read_text().strip() != self._name:
                    self._strangers.add(thread)
                    continue
                # Fields: time on a core, time waiting for a core, both in ns, and the number of time slices.
                after[thread] = int((tasks / thread / "schedstat").read_text().split()[1])
            except (OSError, IndexError, ValueError):
                continue  # the thread has ended, or the kernel does not count
        self._waited_ns_by_thread = after
        self._strangers.intersection_update(threads)
        if not after:
            return None
        return sum(waited_ns - before.get(thread, 0) for thread, waited_ns in after.items()) * _NS

    def idle_s(self) -> float | None:
        try:
            lines = (self._proc / "stat").read_text().splitlines()
        except OSError:
            return None
        # Fields: name, user, nice, system, idle, iowait, ..., in ticks.
        fields = [line.split() for line in lines if line.startswith("cpu")]
        ticks = sum(int(field[4]) + int(field[5]) for field in fields if field[0] in self._cores)
        before, self._idle_ticks = self._idle_ticks, ticks
        return (ticks - before) * self._tick_s
