"""Run one section in its own process, so that a device error affects no other section.

python -m benchmarks.gpu.section NAME --budget-s S --out FILE [--quick] [--peer FOLDER]
"""

import argparse
import importlib
import sys
from pathlib import Path

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.catalog import SECTIONS

EXIT_NO_GPU = 2


def main(words: list[str] | None = None) -> int:
    """Return 0 if the section ran to its end, even if parts failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[section.name for section in SECTIONS])
    parser.add_argument("--budget-s", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--peer", type=Path)
    given = parser.parse_args(words)
    bench = Bench(given.name, given.budget_s, given.out, is_quick=given.quick, peer=given.peer)
    bench.save()
    with bench.part(given.name):
        section = next(section for section in SECTIONS if section.name == given.name)
        importlib.import_module(section.module).run(bench)
    bench.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
