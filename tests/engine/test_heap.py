"""The heap that the engine process keeps."""

import platform
import subprocess
import sys

import pytest

ROUNDS = """
import resource
import numpy as np

def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        arrays = [np.ones(1 << 16) for _ in range(8)]
        del arrays
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
"""
PAGES = 8 * (8 << 16) // 4096  # of the arrays of one round


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other C libraries keep freed memory by rules of their own"
)
def test_the_arrays_of_a_large_step_cause_no_page_faults() -> None:
    script = ROUNDS + "from tiercel.engine.heap import keep_heap\nkeep_heap()\nprint(faults())"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(found.stdout) < PAGES
