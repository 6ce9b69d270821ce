"""The host memory that this process may use, as limited by the machine and by control groups."""

from pathlib import Path

from tiercel.device.control_group import group_folders

_UNLIMITED = 1 << 60
_UNIFIED = ("memory.max", "memory.current")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that can be allocated without swapping: the smallest limit of the kernel and the cgroups."""
    machine = _meminfo(proc, "MemAvailable")
    return max(0, min(machine, *(limit - used for limit, used in _limits(proc, cgroups)), _UNLIMITED))


def total_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process could use on an idle machine."""
    return min(_meminfo(proc, "MemTotal"), *(limit for limit, _ in _limits(proc, cgroups)), _UNLIMITED)


def _meminfo(proc: Path, field: str) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024
    return _UNLIMITED


def _limits(proc: Path, cgroups: Path) -> list[tuple[int, int]]:
    """Return (limit, use without reclaimable pages) of each control group of this process, version 2 or 1."""
    limits: list[tuple[int, int]] = []
    for folder, is_unified in group_folders("memory", proc, cgroups):
        limit, used = (_number(folder / name) for name in (_UNIFIED if is_unified else _VERSION_1))
        if limit is not None and used is not None and limit < _UNLIMITED:
            # Page cache that can be dropped counts as used by the group, but does not prevent an allocation.
            limits.append((limit, max(0, used - _inactive_file(folder))))
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
