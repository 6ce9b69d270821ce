"""The processors that this process may use: the cores of its affinity mask, and the CPU quota of its control groups.

https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu and https://docs.kernel.org/scheduler/sched-bwc.html
"""

import os
import threading
from collections.abc import Collection, Iterable
from pathlib import Path

from tiercel.device.control_group import group_folders

BACKGROUND_NICE = 10
"""The nice value of threads whose work no request waits for; their weight is a ninth of a compute thread's."""


def usable_cores() -> list[int]:
    """Return the numbers of the cores in the affinity mask of this process, in ascending order."""
    return sorted(os.sched_getaffinity(0))


def cpu_quota(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the smallest CPU quota of the control groups of this process, in cores; None if there is no quota."""
    quotas: list[float] = []
    for folder, is_unified in group_folders("cpu", proc, cgroups):
        names = ("cpu.max",) if is_unified else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        try:
            words = " ".join((folder / name).read_text() for name in names).split()
        except OSError:
            continue
        # "max 100000" and, in version 1, "-1" stand for no quota.
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]) > 0:
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def default_threads(cores: Collection[int], quota: float | None) -> int:
    """Return the number of compute threads for these cores and this quota (in cores), at least 1.

    The quota is rounded down. A group that uses up its quota is stopped as a whole, up to the end of the period, while
    a team waits at its barrier; the rest of the quota is needed by the HTTP process and the I/O threads anyway.
    """
    return max(1, len(cores) if quota is None else min(len(cores), int(quota)))


def show_cores(cores: Iterable[int]) -> str:
    """Return core numbers in the format of the kernel's lists, such as `0-3,8`."""
    runs: list[tuple[int, int]] = []
    for core in cores:
        if runs and runs[-1][1] == core - 1:
            runs[-1] = (runs[-1][0], core)
        else:
            runs.append((core, core))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def lower_priority() -> None:
    """Set the calling thread's nice value to `BACKGROUND_NICE`, unless it is higher already."""
    thread = threading.get_native_id()
    if os.getpriority(os.PRIO_PROCESS, thread) < BACKGROUND_NICE:
        os.setpriority(os.PRIO_PROCESS, thread, BACKGROUND_NICE)
