"""The current speeds of copies and prefills, corrected by measurements while the engine runs. Imports no torch."""

from collections.abc import Iterable

from msgspec.structs import replace

from tiercel.kvcache.store.disk import DiskCounts
from tiercel.scheduler.cost import StepCosts
from tiercel.values.outcome import RouteGauges
from tiercel.values.rates import Rates
from tiercel.values.tier import Route

_FULL_BYTES = 64 << 20  # a measurement of this size has the full weight, a smaller one proportionally less
_FULL_WEIGHT = 0.5
_MAX_RATIO = 16.0  # maximum ratio of measured to expected time, which limits the effect of one outlier
_HALF_LIFE_S = 30.0  # half-life of the distance between an unmeasured route's estimate and its best rate
_BEST_WEIGHT = 1 / 16  # weight of a measurement below the best rate, so that a lasting slowdown lowers it
_LEARN_S = 0.5  # between two calls of `learn`
_FAR_CONTEXT = 4096  # tokens


class RateBook:
    """The current rates. A measurement has a weight by its size, because small ones say little about a rate.

    A route that seems slow is not used, so no measurement would correct its rate. Each route therefore has a best rate
    in addition to its estimate: the best known rate, which slow measurements lower with a sixteenth of their weight.
    While a route is not measured, its estimate returns to the best rate; the ratio of both has a half-life of 30 s.
    The route is then used and measured again, which shows whether the slowdown has ended.
    """

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._best = dict(rates.bytes_per_s_by_route)
        self._measured: dict[Route, float] = {}  # since the last recovery: weight of the largest measurement, 0 to 1
        self._disk_seen = DiskCounts()
        self._copies_seen: dict[Route, tuple[int, float]] = {}

    @property
    def rates(self) -> Rates:
        """The current rates, as a frozen value."""
        return self._rates

    def note(self, route: Route, bytes: int, seconds: float) -> None:
        """Correct the rate of a route by a measurement: the time of copying `bytes`, without waiting times."""
        if bytes <= 0 or seconds <= 0:
            return
        by_route = self._rates.bytes_per_s_by_route
        known = by_route.get(route, 0.0)
        rate = bytes / seconds
        size = min(1.0, bytes / _FULL_BYTES)
        best = self._best.get(route, 0.0)
        if best > 0:
            best *= min(1.0, max(rate / best, 1 / _MAX_RATIO)) ** (_BEST_WEIGHT * size)
        if known > 0:
            # Times are averaged instead of speeds, because a sequence waits for the time of a copy.
            rate = known / _correction(seconds / bytes * known, size)
        self._best[route] = max(best, rate)
        self._measured[route] = max(size, self._measured.get(route, 0.0))
        self._rates = replace(self._rates, bytes_per_s_by_route=by_route | {route: rate})

    def recover(self, elapsed_s: float) -> None:
        """Move the estimates of routes with few measurements towards their best rates, for `elapsed_s` of time."""
        by_route = self._rates.bytes_per_s_by_route
        recovered: dict[Route, float] = {}
        for route, rate in by_route.items():
            best, unmeasured = self._best.get(route, rate), 1.0 - self._measured.get(route, 0.0)
            if 0 < rate < best:
                recovered[route] = best * (rate / best) ** (0.5 ** (unmeasured * elapsed_s / _HALF_LIFE_S))
        self._measured.clear()
        if recovered:
            self._rates = replace(self._rates, bytes_per_s_by_route=by_route | recovered)

    def follow(self, costs: StepCosts) -> None:
        """Take the cost of prompt tokens from the step costs, which every step corrects."""
        chunk, context = costs.largest_prompt
        if not chunk or not context:
            return
        context = min(context, _FAR_CONTEXT)
        one_ms, far_ms = costs.prompt_ms(chunk, 0), costs.prompt_ms(chunk, context)
        context_ms = (far_ms - one_ms) / chunk / context
        # On average a token of the chunk has half of the chunk as context.
        token_ms = max(one_ms / chunk - context_ms * chunk / 2, one_ms / chunk / 2)
        self._rates = replace(
            self._rates,
            prefill_token_s=token_ms / 1e3,
            prefill_context_s=context_ms / 1e3,
        )

    def learn(self, routes: Iterable[RouteGauges], disk: DiskCounts | None, elapsed_s: float = _LEARN_S) -> None:
        """Correct the rates by the copies since the last call, `elapsed_s` ago. Late reads are included."""
        for gauges in routes:
            if gauges.route not in (Route.SPILL, Route.RESTORE, Route.VERIFY, Route.SIGN):
                continue  # reads and writes of the disk are measured by `disk`, without their time in the queue
            before = self._copies_seen.get(gauges.route, (0, 0.0))
            self.note(gauges.route, gauges.bytes - before[0], gauges.seconds - before[1])
            self._copies_seen[gauges.route] = (gauges.bytes, gauges.seconds)
        if disk is not None:
            seen = self._disk_seen
            self.note(
                Route.PREFETCH,
                disk.read_bytes + disk.late_bytes - seen.read_bytes - seen.late_bytes,
                disk.read_seconds + disk.late_seconds - seen.read_seconds - seen.late_seconds,
            )
            self.note(Route.PERSIST, disk.write_bytes - seen.write_bytes, disk.write_seconds - seen.write_seconds)
            self._disk_seen = disk
        self.recover(elapsed_s)


def _correction(ratio: float, size: float) -> float:
    """Return the damped correction factor of a time, from the ratio of measured to expected time."""
    return 1 + _FULL_WEIGHT * min(1.0, size) * (min(ratio, _MAX_RATIO) - 1)
