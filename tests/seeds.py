"""New seeds for every run: random walks use them beside their fixed seeds. The names of the tests show them."""

import os
import random


def fresh_seeds(count: int) -> list[int]:
    """Return `count` seeds that differ in every run. All workers of one run of pytest-xdist get the same seeds."""
    rng = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID"))
    return [rng.randrange(1 << 31) for _ in range(count)]
