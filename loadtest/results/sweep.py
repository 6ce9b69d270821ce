"""How much load a server takes: the request rate is raised until goals are missed, then the knee is closed in on."""

from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from tiercel.errors import ConfigError
from tiercel.loadtest.results.record import RunResult

_MOST_POINTS = 24


class Point(Struct, frozen=True, kw_only=True):
    """What came of one offered rate."""

    rate: float  # requests/s offered
    good_share: float  # of the requests sent, those that kept all goals
    request_throughput: float
    output_throughput: float
    figures: dict[str, float | None]

    @property
    def goodput(self) -> float:
        """Good requests/s of those offered. Not by the run's length: its end, when nothing comes in, would lower it."""
        return self.rate * self.good_share


class SearchPlan(Struct, frozen=True, kw_only=True):
    """Where to look and how closely."""

    first_rate: float = 1.0
    highest_rate: float = 1024.0
    growth: float = 2.0
    precision: float = 0.05  # the knee is known to within this part of itself
    wanted_share: float = 0.95  # of requests that must be good

    def check(self) -> None:
        """Errors: ConfigError."""
        if not 0 < self.first_rate <= self.highest_rate:
            raise ConfigError("bench.sweep", "the first rate is above 0 and not above the highest")
        if self.growth <= 1 or self.precision <= 0 or not 0 < self.wanted_share <= 1:
            raise ConfigError("bench.sweep", "growth is above 1, precision above 0, the share of good requests 0 to 1")


class Sweep(Struct, frozen=True, kw_only=True):
    """A finished sweep."""

    plan: SearchPlan
    command: list[str]
    points: list[Point]  # by rate
    knee: Point | None
    best: Point


def search(measure: Callable[[float], Point], plan: SearchPlan) -> Iterator[Point]:
    """Every point as it is measured: geometric steps up (or down, when the first is too much), then bisection."""
    kept: float | None = None  # the highest rate that kept the goals below the first that did not
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
    """The highest rate that kept the goals below every one that missed them. None: none did."""
    missed = min((point.rate for point in points if point.good_share < wanted_share), default=float("inf"))
    kept = [point for point in points if point.good_share >= wanted_share and point.rate < missed]
    return max(kept, key=lambda point: point.rate, default=None)


def best(points: Sequence[Point]) -> Point:
    """The point with the most good requests/s, whatever share of all they were."""
    return max(points, key=lambda point: point.goodput)


def point_of(result: RunResult, rate: float) -> Point:
    """What a run at `rate` says."""
    asked = max(1, result.completed + result.failed)
    return Point(
        rate=rate,
        good_share=min(1.0, (result.request_goodput or 0.0) * result.duration / asked),
        request_throughput=result.request_throughput,
        output_throughput=result.output_throughput,
        figures=result.figures,
    )


def make_sweep(plan: SearchPlan, command: Sequence[str], points: Sequence[Point]) -> Sweep:
    """Sum the points up."""
    ordered = sorted(points, key=lambda point: point.rate)
    return Sweep(
        plan=plan, command=list(command), points=ordered, knee=knee(ordered, plan.wanted_share), best=best(ordered)
    )
