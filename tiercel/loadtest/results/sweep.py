"""A sweep of the request rate: it is raised until goals are missed, then the knee is found by bisection."""

from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from tiercel.loadtest.results.record import RunResult
from tiercel.values.errors import ConfigError

_MOST_POINTS = 24


class Point(Struct, frozen=True, kw_only=True):
    """The result at one offered rate."""

    rate: float  # requests/s offered
    good_share: float  # of all requests sent, the share that kept all goals
    request_throughput: float
    output_throughput: float
    figures: dict[str, float | None]

    @property
    def goodput(self) -> float:
        """Good requests/s: offered rate times good share. The length of the run would count its last answers, too."""
        return self.rate * self.good_share


class SearchPlan(Struct, frozen=True, kw_only=True):
    """The range and the precision of the search."""

    first_rate: float = 1.0
    highest_rate: float = 1024.0
    growth: float = 2.0
    precision: float = 0.05  # relative precision of the knee
    wanted_share: float = 0.95  # of requests that must be good

    def check(self) -> None:
        """Check the values. Errors: ConfigError."""
        if not 0 < self.first_rate <= self.highest_rate:
            rates = f"first rate {self.first_rate:g}, highest rate {self.highest_rate:g}"
            raise ConfigError("bench.sweep", f"{rates}: need 0 < first rate <= highest rate")
        if self.growth <= 1 or self.precision <= 0 or not 0 < self.wanted_share <= 1:
            raise ConfigError(
                "bench.sweep",
                f"growth {self.growth:g}, precision {self.precision:g}, good share {self.wanted_share:g}: "
                "need growth > 1, precision > 0, 0 < good share <= 1",
            )


class Sweep(Struct, frozen=True, kw_only=True):
    """A finished sweep."""

    plan: SearchPlan
    command: list[str]
    points: list[Point]  # ordered by rate
    knee: Point | None
    best: Point


def search(measure: Callable[[float], Point], plan: SearchPlan) -> Iterator[Point]:
    """Measure points and yield each: geometric steps up, or down if the first misses the goals, then bisection."""
    kept: float | None = None  # the highest rate that kept the goals below the lowest that missed them
    missed: float | None = None
    rate = plan.first_rate
    for _ in range(_MOST_POINTS):
        point = measure(rate)
        yield point
        if point.good_share >= plan.wanted_share:
            kept = rate
        else:
            missed = rate
        if missed is None:
            if rate >= plan.highest_rate:
                return
            rate = min(rate * plan.growth, plan.highest_rate)
        elif kept is None:
            rate = missed / plan.growth
        elif missed / kept <= 1 + plan.precision:
            return
        else:
            rate = (kept * missed) ** 0.5


def knee(points: Sequence[Point], wanted_share: float) -> Point | None:
    """Return the highest rate that kept the goals below all that missed them, or None."""
    missed = min((point.rate for point in points if point.good_share < wanted_share), default=float("inf"))
    kept = [point for point in points if point.good_share >= wanted_share and point.rate < missed]
    return max(kept, key=lambda point: point.rate, default=None)


def best(points: Sequence[Point]) -> Point:
    """Return the point with the most good requests/s."""
    return max(points, key=lambda point: point.goodput)


def point_of(result: RunResult, rate: float) -> Point:
    """Return the point of a run at `rate`."""
    asked = max(1, result.completed + result.failed)
    return Point(
        rate=rate,
        good_share=min(1.0, (result.request_goodput or 0.0) * result.duration / asked),
        request_throughput=result.request_throughput,
        output_throughput=result.output_throughput,
        figures=result.figures,
    )


def make_sweep(plan: SearchPlan, command: Sequence[str], points: Sequence[Point]) -> Sweep:
    """Return the sweep of these points."""
    ordered = sorted(points, key=lambda point: point.rate)
    return Sweep(
        plan=plan, command=list(command), points=ordered, knee=knee(ordered, plan.wanted_share), best=best(ordered)
    )
