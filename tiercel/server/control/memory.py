"""Memory of the HTTP process that is given back to the operating system after a burst of requests.

Without this, the process keeps its peak: freed blocks of glibc's heap stay there, and objects in reference cycles wait
for a collection of garbage, which is rare (see `server/launch.py`).
"""

import asyncio
import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path

import structlog

from tiercel.values.units import KIB, MIB

_INTERVAL_S = 15.0
_GROWTH = 1.25  # times the level at rest, beyond which memory is returned
_MIN_GROWTH_BYTES = 16 * MIB
_M_ARENA_MAX, _M_MMAP_THRESHOLD = -8, -3  # of mallopt(3)
_ARENAS = 2  # heaps for all threads
_MMAP_BYTES = 128 * KIB  # buffers from this size are mapped alone, and unmapped when they are freed


def resident_bytes() -> int:
    """Return the resident memory of this process; Linux only, elsewhere 0."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return 0


def return_large_buffers() -> None:
    """Let malloc return large buffers as soon as they are freed; glibc only.

    Left alone, glibc raises the size from which buffers are mapped alone to that of the largest buffer that was freed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        mallopt(_M_ARENA_MAX, _ARENAS)


def trim_heap() -> None:
    """Return the free pages of malloc's heaps; glibc only. Other threads run meanwhile."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


class MemoryTrimmer:
    """Returns free memory every 15 s while the process is well above its lowest level."""

    def __init__(self, resident: Callable[[], int] = resident_bytes, trim: Callable[[], None] = trim_heap) -> None:
        self._resident = resident
        self._trim = trim
        self._rest_bytes = 0
        self._log = structlog.stdlib.get_logger("server.memory")

    async def run(self) -> None:
        """Look after the memory until cancelled."""
        self._rest_bytes = self._resident()
        while True:
            await asyncio.sleep(_INTERVAL_S)
            if self.is_due():
                before_bytes = self._resident()
                gc.collect()
                await asyncio.to_thread(self._trim)
                self._log.debug("memory_trimmed", before_bytes=before_bytes, after_bytes=self._resident())

    def is_due(self) -> bool:
        """Return whether the memory is well above its lowest level, which this call notes."""
        now_bytes = self._resident()
        self._rest_bytes = min(self._rest_bytes, now_bytes) if self._rest_bytes else now_bytes
        return now_bytes > max(_GROWTH * self._rest_bytes, self._rest_bytes + _MIN_GROWTH_BYTES)
