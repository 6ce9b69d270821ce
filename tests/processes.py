"""Processes that a test did not start itself."""

import os
import select
from pathlib import Path


def wait_gone(pid: int, patience_s: float = 30.0) -> None:
    """Wait until a process that is not our child has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], patience_s)[0], Path(f"/proc/{pid}/status").read_text()
    finally:
        os.close(handle)
