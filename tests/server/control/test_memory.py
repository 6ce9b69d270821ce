"""Memory that is given back after bursts."""

import asyncio
import contextlib
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.test_launch import started
from tiercel.server.control.memory import MemoryTrimmer
from tiercel.values.units import MIB

_LARGE = """
import sys
from tiercel.server.control.memory import resident_bytes, return_large_buffers
if sys.argv[1] == "on":
    return_large_buffers()
rest = resident_bytes()
large = bytearray(b"x" * 30_000_000)
del large  # from now on, glibc alone would take smaller buffers from its heap
buffers, gaps = [], []
for _ in range(200):
    buffers.append(bytearray(b"x" * 500_000))
    gaps.append(bytearray(b"x" * 2_000))  # lies above them and outlives them
del buffers
print(rest, resident_bytes())
"""
_SMALL = """
import gc, sys
from tiercel.server.control.memory import resident_bytes, return_large_buffers, trim_heap
return_large_buffers()
rest = resident_bytes()
buffers = [bytearray(b"x" * 50_000) for _ in range(2_000)]
gap = bytearray(b"x" * 60_000)  # lies above all of them and outlives them
del buffers
if sys.argv[1] == "on":
    trim_heap()
print(rest, resident_bytes())
"""


def _levels(program: str, mechanism: str) -> tuple[int, int]:
    """Return the resident memory before and after a burst of buffers in a process of its own."""
    done = subprocess.run([sys.executable, "-c", program, mechanism], capture_output=True, text=True, check=True)
    rest, after = done.stdout.split()
    return int(rest), int(after)


@pytest.mark.parametrize("program", [_LARGE, _SMALL], ids=["large buffers, at once", "small ones, by trimming"])
def test_memory_of_a_burst_is_given_back(program: str) -> None:
    rest, after = _levels(program, "on")
    assert after < 1.5 * rest
    rest, after = _levels(program, "off")
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


@pytest.mark.slow
def test_the_daemon_looks_after_its_memory(model_folder: Path) -> None:
    """It looks every 15 s; until then it holds bodies that do not end."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(started(model_folder, log_level="debug"))
        server.await_url()
        for _ in range(8):
            port = int(server.url.rpartition(":")[2])
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(head + b"Content-Length: 8000000\r\n\r\n" + b'{"prompt": "' + b"a" * 7_000_000)
        assert server.process.stderr is not None
        assert any("memory_trimmed" in line for line in server.process.stderr)
