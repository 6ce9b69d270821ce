"""New seeds for every run: random walks use them beside their fixed seeds. The names of the tests show them."""

import os
import random
from collections.abc import Iterable

import pytest


def run_random() -> random.Random:
    """Return a source of numbers that differs in every run and is the same for all workers of pytest-xdist."""
    return random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID"))


def fresh_seeds(count: int) -> list[int]:
    """Return `count` seeds that differ in every run. All workers of one run of pytest-xdist get the same seeds."""
    rng = run_random()
    return [rng.randrange(1 << 31) for _ in range(count)]


def fast_and_slow(fast: Iterable[object], slow: Iterable[object]) -> list[object]:
    """Return the values of a parameter: `make test` runs the first ones, `make test-slow` the others."""
    return [*fast, *(pytest.param(value, marks=pytest.mark.slow) for value in slow)]
