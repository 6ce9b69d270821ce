"""A control group that limits the memory of some processes, of version 2 or 1."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.programs import end_unavailable

_GROUPS = Path("/sys/fs/cgroup")


@contextmanager
def memory_group(limit_bytes: int, pids: Iterable[int]) -> Iterator[None]:
    """Limit the memory that these processes and their children take from now on. The kernel kills beyond it.

    The calling test ends if this machine allows no control groups: see `end_unavailable`.
    """
    is_unified = (_GROUPS / "cgroup.controllers").exists()
    parent, limit = (_GROUPS, "memory.max") if is_unified else (_GROUPS / "memory", "memory.limit_in_bytes")
    folder = parent / f"tiercel-faults-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(limit_bytes))
    except OSError as exc:
        end_unavailable(f"there is no control group for memory: {exc}")
    try:
        for pid in pids:
            (folder / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for pid in (folder / "cgroup.procs").read_text().split():
            (parent / "cgroup.procs").write_text(pid)
        folder.rmdir()
