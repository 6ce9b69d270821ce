"""The machine and the versions that a result was made with, without names of people or hosts."""

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tiercel import __version__
from tiercel.values.units import show_bytes

_CLIENT = ("httpx", "msgspec", "tokenizers")


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def machine_facts() -> dict[str, str]:
    """Return processor, cores, memory and system."""
    return {
        "cpu": _field(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        "cores": f"{cores()} of {os.cpu_count()}",
        "memory": show_bytes(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
        "system": f"{platform.system()} {platform.release()}",
    }


def versions(packages: Sequence[str] = _CLIENT) -> dict[str, str]:
    """Return the versions of tiercel, Python and the installed ones of `packages`."""
    found = {"tiercel": __version__, "python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _field(path: Path, name: str) -> str | None:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
