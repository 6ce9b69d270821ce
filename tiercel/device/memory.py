"""The host memory that this process may use, as limited by the machine, control groups and the process's own limits."""

from pathlib import Path
from typing import NamedTuple

from tiercel.device.control_group import group_folders
from tiercel.system.process_limits import memory_limits
from tiercel.values.units import show_bytes

_UNLIMITED = 1 << 60
_UNIFIED = ("memory.max", "memory.current")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


class HostRoom(NamedTuple):
    """The memory that a limit leaves to this process."""

    free_bytes: int
    limit: str  # in words


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that can be allocated without swapping: the smallest of all limits."""
    return tightest(proc, cgroups).free_bytes


def tightest(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> HostRoom:
    """Return the room within the limit that leaves the least: of the machine, a control group or this process."""
    rooms = [HostRoom(min(_meminfo(proc, "MemAvailable"), _UNLIMITED), "the free memory of the machine")]
    for folder, limit, used in _limits(proc, cgroups):
        rooms.append(HostRoom(max(0, limit - used), f"the limit of {show_bytes(limit)} of the control group {folder}"))
    rooms += [HostRoom(limit.left_bytes, str(limit)) for limit in memory_limits()]
    return min(rooms, key=lambda room: room.free_bytes)


def total_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process could use on an idle machine."""
    return min(_meminfo(proc, "MemTotal"), *(limit for _, limit, _ in _limits(proc, cgroups)), _UNLIMITED)


def _meminfo(proc: Path, field: str) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024
    return _UNLIMITED


def _limits(proc: Path, cgroups: Path) -> list[tuple[Path, int, int]]:
    """Return (folder, limit, use without reclaimable pages) of each control group of this process, version 2 or 1."""
    limits: list[tuple[Path, int, int]] = []
    for folder, is_unified in group_folders("memory", proc, cgroups):
        limit, used = (_number(folder / name) for name in (_UNIFIED if is_unified else _VERSION_1))
        if limit is not None and used is not None and limit < _UNLIMITED:
            # Page cache that can be dropped counts as used by the group, but does not prevent an allocation.
            limits.append((folder, limit, max(0, used - _inactive_file(folder))))
    return limits


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _inactive_file(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        name, _, number = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(number)
    return 0
