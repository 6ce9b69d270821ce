"""The limits of this machine: read bandwidth, and the peak of products by type of numbers.

    python benchmarks/cpu/limits.py [--threads N] [--json FILE]

Compiles limits.cpp for the class of the processor (`TIERCEL_CPU_CLASS` selects a lower one) with $CXX or g++, and runs
it for some seconds. Bandwidths are in GB/s, peaks in G operations per second, of all threads together unless the
name says otherwise; each is the best of 25 runs. Exit code 2 without a compiler.
"""

import argparse
import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.cpu.processor import CLASSES, ProcessorClass, read_processor
from benchmarks.cpu.refusal import refuse

READ = "read_gb_s"
PEAK_BY_CLASS: dict[ProcessorClass, str] = {
    "portable": "fp32_gflop_s",
    "avx2": "fp32_gflop_s",
    "avx512_bf16": "bf16_gflop_s",
    "amx": "amx_bf16_gflop_s",
}
"""The peak that a product with 16-bit weights could reach."""

_SOURCE = Path(__file__).with_name("limits.cpp")
_FLAGS_BY_CLASS: dict[ProcessorClass, str] = {
    "portable": "",
    "avx2": "-mavx2 -mfma -mf16c",
    "avx512_bf16": "-mavx512f -mavx512bw -mavx512vl -mavx512vnni -mavx512bf16",
    "amx": "-mamx-tile -mamx-bf16 -mamx-int8",
}


def compiler_flags(kind: ProcessorClass) -> list[str]:
    """Return the compiler's flags for a class: those of the classes before it, too."""
    classes = CLASSES[: CLASSES.index(kind) + 1]
    return ["-O3", "-std=c++17", "-fopenmp", *(flag for one in classes for flag in _FLAGS_BY_CLASS[one].split())]


def measure_limits(kind: ProcessorClass, threads: int) -> dict[str, float]:
    """Return the limits by name. Errors: SystemExit without a compiler, or if the program does not compile or run."""
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    if shutil.which(compiler[0]) is None:
        refuse(f"no C++ compiler: {compiler[0]} is missing; on Debian and Ubuntu: apt install g++ (or set CXX)")
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "limits")
        command = [*compiler, *compiler_flags(kind), str(_SOURCE), "-o", program]
        for words in (command, [program, str(threads)]):
            done = subprocess.run(words, check=False, capture_output=True, text=True)
            if done.returncode != 0:
                refuse(f"{shlex.join(words)} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return {name: float(value) for name, value in (line.split() for line in done.stdout.splitlines())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help="default: every core")
    parser.add_argument("--json", type=Path, help="file for the result")
    arguments = parser.parse_args()
    processor = read_processor(os.environ.get("TIERCEL_CPU_CLASS"))
    threads = arguments.threads or processor.threads
    limits = measure_limits(processor.kind, threads)
    result = {"processor": dataclasses.asdict(processor), "threads": threads, "limits": limits}
    print(f"{processor.name}, {processor.kind}, {threads} threads, caches {processor.caches}")
    for name, value in limits.items():
        print(f"{name:22} {value:8.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
