"""Confidence intervals by the bootstrap: how far a statistic varies between samples like the given one.

A new sample is n values drawn with replacement from the n given values. A percentile needs no sample: the position of
the k-th smallest of n uniform draws has a Beta distribution, so that one number replaces n.
"""

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

_MOST_DRAWN = 3000  # values; the mean of more values has a normal distribution for this purpose
_MOST_STEPS = 200_000_000  # values looked at for groups, in all rounds together: a few seconds
_LEAST_ROUNDS = 200

Floats = NDArray[np.float64]
Sampler = Callable[[int], Floats]
"""Returns the statistic of the given number of new samples."""


class ConfidenceInterval(Struct, frozen=True):
    """The range that holds the statistic of 95 of 100 new samples."""

    low: float
    high: float


def interval(drawn: Floats) -> ConfidenceInterval:
    """Return the middle 95 % of the drawn statistics."""
    low, high = np.percentile(drawn, 2.5, method="lower"), np.percentile(drawn, 97.5, method="higher")
    return ConfidenceInterval(float(low), float(high))


def percentile_sampler(values: Sequence[float], rank: float, rng: np.random.Generator) -> Sampler:
    """Return a sampler of a percentile, as `distribution.percentile` defines it."""
    ordered = np.sort(np.asarray(values, np.float64))
    count = len(ordered)
    position = (count - 1) * rank / 100
    below = int(position)
    part = position - below

    def draw(rounds: int) -> Floats:
        share = rng.beta(below + 1, count - below, rounds)
        low = ordered[_places(share, count)]
        if not part:
            return low
        next_share = share + (1 - share) * rng.beta(1, count - below - 1, rounds)
        return low + part * (ordered[_places(next_share, count)] - low)

    return draw


def mean_sampler(values: Sequence[float], rng: np.random.Generator) -> Sampler:
    """Return a sampler of the mean."""
    all_values = np.asarray(values, np.float64)
    count = len(all_values)

    def draw(rounds: int) -> Floats:
        if count > _MOST_DRAWN:
            return rng.normal(all_values.mean(), all_values.std() / count**0.5, rounds)
        return np.array([rng.choice(all_values, count).mean() for _ in range(rounds)])

    return draw


def grouped_percentile_sampler(groups: Sequence[Sequence[float]], rank: float, rng: np.random.Generator) -> Sampler:
    """Return a sampler of a percentile of all values that draws whole groups.

    The gaps of one request are not independent of each other; requests are.
    """
    values = np.concatenate([np.asarray(group, np.float64) for group in groups])
    group_by_value = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    order = np.argsort(-values, kind="stable")
    ranked, group_by_value = values[order], group_by_value[order]

    def draw_one() -> float:
        times = np.bincount(rng.integers(len(groups), size=len(groups)), minlength=len(groups))
        seen = np.cumsum(times[group_by_value])  # of the new sample, values at least as large as each ranked one
        beyond = (1 - rank / 100) * seen[-1]
        return float(ranked[min(int(np.searchsorted(seen, beyond, side="right")), len(ranked) - 1)])

    return lambda rounds: np.array([draw_one() for _ in range(rounds)])


def rounds_for(groups: Sequence[Sequence[float]], rounds: int) -> int:
    """Return `rounds`, or fewer for groups with so many values that they would take more than a few seconds."""
    return max(_LEAST_ROUNDS, min(rounds, _MOST_STEPS // max(1, sum(map(len, groups)))))


def _places(shares: Floats, count: int) -> NDArray[np.intp]:
    return np.minimum((shares * count).astype(np.intp), count - 1)
