"""The host memory that this process may use, as limited by the machine and by control groups."""

from pathlib import Path

_UNLIMITED = 1 << 60


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
    for folder, limit_name, used_name in _folders(proc, cgroups):
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None and limit < _UNLIMITED:
            # Page cache that can be dropped counts as used by the group, but does not prevent an allocation.
            limits.append((limit, max(0, used - _inactive_file(folder))))
    return limits


def _folders(proc: Path, cgroups: Path) -> list[tuple[Path, str, str]]:
    folders: list[tuple[Path, str, str]] = []
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = cgroups, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = root / path.strip("/")
        # Inside a container the path may not exist: the container's own group is mounted at the root.
        for candidate in (folder, *folder.parents):
            folders.append((candidate, *names))
            if candidate == root:
                break
    return folders


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
