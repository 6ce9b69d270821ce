"""Memory that is given back after bursts."""

import asyncio
import subprocess
import sys

from tiercel.server.control.memory import MemoryTrimmer
from tiercel.units import MIB

_BURST = """
import gc, sys
from tiercel.server.control.memory import resident_bytes, return_large_buffers, trim_heap
if sys.argv[1] == "on":
    return_large_buffers()
rest = resident_bytes()
for _ in range(3):
    buffers = [bytearray(b"x" * size) for size in range(20_000, 400_000, 2_000)]
    kept = [bytearray(1000) for _ in range(20_000)]
    buffers += [bytearray(b"x" * 100_000) for _ in range(1000)]
    gap = bytearray(b"x" * 60_000)  # lies above all of them and outlives them
    del buffers, kept
if sys.argv[1] == "on":
    gc.collect()
    trim_heap()
print(rest, resident_bytes())
"""


def _levels(mechanism: str) -> tuple[int, int]:
    """Return the resident memory before and after a burst of buffers in a process of its own."""
    done = subprocess.run([sys.executable, "-c", _BURST, mechanism], capture_output=True, text=True, check=True)
    rest, after = done.stdout.split()
    return int(rest), int(after)


def test_memory_of_a_burst_is_given_back() -> None:
    rest, after = _levels("on")
    assert after < 1.5 * rest
    rest, after = _levels("off")
    assert after > 1.5 * rest  # otherwise this test shows nothing


def test_memory_is_trimmed_only_well_above_its_lowest_level() -> None:
    levels = [100, 118, 130, 90, 105, 110]
    trimmer = MemoryTrimmer(lambda: levels.pop(0) * MIB)
    assert [trimmer.is_due() for _ in range(6)] == [False, False, True, False, False, False]
    assert not levels


def test_the_trimmer_runs_until_it_is_cancelled() -> None:
    async def test() -> None:
        running = asyncio.create_task(MemoryTrimmer(lambda: 0, lambda: None).run())
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert running.cancelled()

    asyncio.run(test())
