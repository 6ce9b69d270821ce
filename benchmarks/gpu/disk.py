"""The SSD tier with its threads, compared with a plain loop of the same calls."""

import os
import tempfile
from pathlib import Path

from benchmarks import ssd
from benchmarks.gpu.bench import Bench

MIB = 1 << 20
TOTAL_BYTES = 1 << 30
THREADS = 8
REPEATS = 3


def run(bench: Bench) -> None:
    """Figures `write`, `read` in GB/s with 2 MiB blocks, and their share of the plain loop."""
    with tempfile.TemporaryDirectory(dir=bench.folder) as name:
        os.chmod(name, 0o700)
        total = TOTAL_BYTES // (4 if bench.is_quick else 1)
        medians = ssd.compare(Path(name), 2 * MIB, total, THREADS, 1 if bench.is_quick else REPEATS)
    for way in ("write", "read"):
        tier, bare = medians[f"tier {way}"], medians[f"bare {way}"]
        bench.record(way, tier / 1e3, "GB/s", bare_gb_per_s=bare / 1e3, share=tier / bare, threads=THREADS)
