"""Fuzz one parser for as many inputs as wanted: `python -m tests.fuzz.run TARGET [--count N] [--seed S]`."""

import argparse
import random
import sys

from tests.fuzz.test_parsers import TARGETS


def main() -> int:
    """Return 0 if every input gave a value or a documented error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=sorted(target.name for target in TARGETS))
    parser.add_argument("--count", type=int, default=100_000, help="inputs (default 100000)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    next(target for target in TARGETS if target.name == given.target).run(given.seed, given.count)
    return 0


if __name__ == "__main__":
    sys.exit(main())
