"""The speeds of copies and prefills, corrected by everything that runs. Imports no torch."""

from collections.abc import Iterable

from msgspec.structs import replace

from tiercel.kvcache.store.disk import DiskCounts
from tiercel.outcome import RouteGauges
from tiercel.rates import Rates
from tiercel.scheduler.cost import StepCosts
from tiercel.tier import Route

_HALF_BYTES = 64 << 20  # a measurement of so much counts half, a smaller one less
_HALF_TOKENS = 2048
_MOST = 0.5
_HICCUP = 16.0
_HALF_LIFE_S = 30.0  # of what a route's estimate lacks to its good rate, while little of the route is measured
_GOOD_WEIGHT = 1 / 16  # of a measurement that is slower than the good rate: a disk that stays slow is known in the end
_LEARN_S = 0.5  # between two calls of `learn`
_FAR_CONTEXT = 4096  # tokens


class RateBook:
    """The speeds as of now. A measurement counts by its size: small ones say little of a rate.

    A route that seems slow is not used, so nothing would ever correct its rate. Therefore each route has a good rate
    beside its estimate: the best that is known, which slow measurements lower a sixteenth as fast. While a route is not
    measured, its estimate comes back to the good rate, with a half-life of 30 s (of the ratio of both). Then it is
    used again, and measured: what was a bad moment is over, and what is still slow seems slow again at once.
    """

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._good = dict(rates.bytes_per_s_by_route)
        self._measured: dict[Route, float] = {}  # since the last recovery: measurements, by size, 1 at most
        self._disk_seen = DiskCounts()
        self._copies_seen: dict[Route, tuple[int, float]] = {}

    @property
    def rates(self) -> Rates:
        """Frozen, as of now."""
        return self._rates

    def note(self, route: Route, bytes: int, seconds: float) -> None:
        """So many bytes took so long in the copying itself, waiting left out."""
        if bytes <= 0 or seconds <= 0:
            return
        by_route = self._rates.bytes_per_s_by_route
        known = by_route.get(route, 0.0)
        rate = bytes / seconds
        size = min(1.0, bytes / _HALF_BYTES)
        good = self._good.get(route, 0.0)
        if good > 0:
            good *= min(1.0, max(rate / good, 1 / _HICCUP)) ** (_GOOD_WEIGHT * size)
        if known > 0:
            # Times are averaged, not speeds: what waits for a copy waits for its time.
            rate = known / _correction(seconds / bytes * known, size)
        self._good[route] = max(good, rate)
        self._measured[route] = max(size, self._measured.get(route, 0.0))
        self._rates = replace(self._rates, bytes_per_s_by_route=by_route | {route: rate})

    def recover(self, elapsed_s: float) -> None:
        """So much time has passed: routes that were measured little come back to their good rates."""
        by_route = self._rates.bytes_per_s_by_route
        recovered: dict[Route, float] = {}
        for route, rate in by_route.items():
            good, unmeasured = self._good.get(route, rate), 1.0 - self._measured.get(route, 0.0)
            if 0 < rate < good:
                recovered[route] = good * (rate / good) ** (0.5 ** (unmeasured * elapsed_s / _HALF_LIFE_S))
        self._measured.clear()
        if recovered:
            self._rates = replace(self._rates, bytes_per_s_by_route=by_route | recovered)

    def follow(self, costs: StepCosts) -> None:
        """Take the time of prompts from the step costs, which every step corrects."""
        chunk, context = costs.largest_prompt
        if not chunk or not context:
            return
        context = min(context, _FAR_CONTEXT)
        one_ms, far_ms = costs.prompt_ms(chunk, 0), costs.prompt_ms(chunk, context)
        context_ms = (far_ms - one_ms) / chunk / context
        # A chunk is behind half of itself, on average.
        token_ms = max(one_ms / chunk - context_ms * chunk / 2, one_ms / chunk / 2)
        self._rates = replace(
            self._rates,
            prefill_token_s=token_ms / 1e3,
            prefill_context_s=context_ms / 1e3,
        )

    def learn(self, routes: Iterable[RouteGauges], disk: DiskCounts | None, elapsed_s: float = _LEARN_S) -> None:
        """Take what has been copied in the `elapsed_s` since the last call, now and then. Late reads count, too."""
        for gauges in routes:
            if gauges.route not in (Route.SPILL, Route.RESTORE, Route.VERIFY, Route.SIGN):
                continue  # a disk's call is measured from its beginning, not from when it was asked for
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
    """The factor on a time, when it was so many times what was expected. One hiccup does not count a thousandfold."""
    return 1 + _MOST * min(1.0, size) * (min(ratio, _HICCUP) - 1)
