"""Seeds that no run has seen: a random walk takes them beside its fixed ones; test names show them."""

import os
import random


def fresh_seeds(count: int) -> list[int]:
    """Return so many seeds, other ones in every run. All workers of one run of pytest-xdist draw the same."""
    rng = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID"))
    return [rng.randrange(1 << 31) for _ in range(count)]
