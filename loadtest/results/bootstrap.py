"""How far a statistic of a sample may be from the truth: what it would have been in other samples like this one.

The bootstrap draws n values from n values with replacement, many times. Quantiles need no drawing: the place of the
k-th smallest of n uniform draws has a Beta distribution, so one number from it does the work of n.
"""

import math
import random
from collections.abc import Callable, Sequence

from msgspec import Struct

_MOST_DRAWN = 3000  # values; the mean of more is normal for our purposes
_GAP_STEPS = 1_500_000  # of work on gaps, all rounds together
_LEAST_ROUNDS = 200

Draw = Callable[[], float]
"""One statistic of one new sample."""


class ConfidenceInterval(Struct, frozen=True):
    """Where 95 of 100 new samples would be."""

    low: float
    high: float


def interval(draw: Draw, rounds: int) -> ConfidenceInterval:
    """The middle 95 % of `rounds` draws."""
    drawn = sorted(draw() for _ in range(rounds))
    return ConfidenceInterval(drawn[int(0.025 * (rounds - 1))], drawn[math.ceil(0.975 * (rounds - 1))])


def quantile_draw(values: Sequence[float], percent: float, chance: random.Random) -> Draw:
    """Draws the percentile of new samples, between neighbours linear as the figures are."""
    ordered = sorted(values)
    count = len(ordered)
    place = (count - 1) * percent / 100
    rank, part = math.floor(place) + 1, place - math.floor(place)

    def draw() -> float:
        share = chance.betavariate(rank, count + 1 - rank)
        low = ordered[min(int(share * count), count - 1)]
        if not part:
            return low
        next_share = share + (1 - share) * chance.betavariate(1, count - rank)
        return low + part * (ordered[min(int(next_share * count), count - 1)] - low)

    return draw


def mean_draw(values: Sequence[float], chance: random.Random) -> Draw:
    """Draws the mean of new samples."""
    count = len(values)
    if count <= _MOST_DRAWN:
        return lambda: math.fsum(chance.choices(values, k=count)) / count
    mean = math.fsum(values) / count
    error = math.sqrt(math.fsum((value - mean) ** 2 for value in values)) / count
    return lambda: chance.gauss(mean, error)


def grouped_quantile_draw(groups: Sequence[Sequence[float]], percent: float, chance: random.Random) -> Draw:
    """Draws a high percentile of all values when whole groups are drawn: gaps of one request are not independent."""
    ranked = sorted(((value, group) for group, values in enumerate(groups) for value in values), reverse=True)
    sizes = [len(values) for values in groups]
    places = range(len(groups))

    def draw() -> float:
        times = [0] * len(groups)
        for place in chance.choices(places, k=len(groups)):
            times[place] += 1
        beyond = (1 - percent / 100) * sum(size * count for size, count in zip(sizes, times, strict=True))
        seen = 0
        for value, group in ranked:
            seen += times[group]
            if seen > beyond:
                return value
        return ranked[-1][0]

    return draw


def rounds_for(groups: Sequence[Sequence[float]], percent: float, rounds: int) -> int:
    """As many rounds as the size of the groups lets one wait for."""
    steps = len(groups) * 2 + sum(map(len, groups)) * (1 - percent / 100)
    return max(_LEAST_ROUNDS, min(rounds, int(_GAP_STEPS / max(steps, 1))))
