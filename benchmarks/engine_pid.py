"""The engine process of a daemon, found among its children, and the figures of a process in /proc."""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

from tiercel.server.client.child import engine_command

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ENGINE = "\0".join(engine_command()[1:]).encode()  # without the interpreter, which has several paths


class ProcessFigures(NamedTuple):
    """What a process holds. `private_bytes` is resident memory without the DDR tier, which is shared memory."""

    private_bytes: int
    descriptors: int
    threads: int


def engine_pid(daemon_pid: int) -> int | None:
    """Return the process id of the daemon's engine, or None if there is none at the moment."""
    for task in Path(f"/proc/{daemon_pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for pid in task.read_text().split():
                if _ENGINE in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return int(pid)
    return None


def kill_engine(daemon_pid: int, patience_s: float = 30.0) -> int:
    """Send SIGKILL to the engine and return its process id. Errors: TimeoutError if no engine appears."""
    end_s = time.monotonic() + patience_s
    while (pid := engine_pid(daemon_pid)) is None:
        if time.monotonic() > end_s:
            raise TimeoutError(f"the daemon has had no engine process for {patience_s:g} s")
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return pid


def process_figures(pid: int) -> ProcessFigures | None:
    """Return the figures of a process, or None if it is gone."""
    try:
        resident, shared = map(int, Path(f"/proc/{pid}/statm").read_text().split()[1:3])
        threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
        descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return None
    return ProcessFigures((resident - shared) * _PAGE_BYTES, descriptors, threads)
