"""Time series and counters of a run, derived from the readings of /metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tiercel.loadtest.metrics import metric
from tiercel.loadtest.metrics.exposition import parse_series, total, totals
from tiercel.loadtest.results.record import Counter, Sample


@dataclass(frozen=True, slots=True)
class History:
    """One quantity over time. None: unknown at that time."""

    name: str
    at_s: tuple[float, ...]
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """A tenant's share of the service, and its fair share: its weight relative to all tenants that have work."""

    got: History
    fair: History


def gauge(samples: Sequence[Sample], series: str, title: str = "") -> History | None:
    """Return a metric summed over its series, or None if no sample has it."""
    values = tuple(total(sample.values, series) for sample in samples)
    known = any(value is not None for value in values)
    return History(title or series, tuple(sample.at_s for sample in samples), values) if known else None


def rate(samples: Sequence[Sample], series: str, title: str = "") -> History | None:
    """Return a counter's growth per second between samples, or None if no sample has it."""
    found = gauge(samples, series, title)
    return found and _per_second(found)


def tier_shares(samples: Sequence[Sample]) -> list[History]:
    """Return the used share of each tier, from 0 to 1, fastest tier first."""
    used, capacity = (_by_label(samples, name, "tier") for name in (metric.KV_USED, metric.KV_CAPACITY))
    instead = {"hbm": metric.KV_USAGE, "ddr": metric.HOST_USAGE}
    shares: list[History] = []
    for tier in metric.TIERS:
        if tier in used and tier in capacity:
            shares.append(replace(_divide(used[tier], capacity[tier]), name=tier.upper()))
        elif tier in instead and (share := gauge(samples, instead[tier], tier.upper())) is not None:
            shares.append(share)
    return shares


def transfer_rates(samples: Sequence[Sample]) -> list[History]:
    """Return the bytes per second of each route between tiers."""
    moved = _by_label(samples, metric.TRANSFER_BYTES, "route")
    found: list[History] = []
    for route, words in metric.ROUTES.items():
        if route in moved:
            found.append(replace(_per_second(moved[route]), name=words))
        elif (
            route in metric.OFFLOAD_BYTES and (theirs := rate(samples, metric.OFFLOAD_BYTES[route], words)) is not None
        ):
            found.append(theirs)
    return found


def transfer_speeds(counters: Mapping[str, Counter]) -> dict[str, float]:
    """Return the bytes per second of each route, over the time in which it moved any."""
    grown = {series: counter.delta for series, counter in counters.items()}
    moved, busy_s = (totals(grown, name, "route") for name in (metric.TRANSFER_BYTES, metric.TRANSFER_SECONDS))
    return {words: moved.get(route, 0.0) / busy_s[route] for route, words in metric.ROUTES.items() if busy_s.get(route)}


def preemption_rates(samples: Sequence[Sample]) -> list[History]:
    """Return the preemptions per second, by mode if the server reports modes."""
    by_mode = _by_label(samples, metric.PREEMPTIONS_BY_MODE, "mode")
    if by_mode:
        return [replace(_per_second(history), name=f"By {mode}, 1/s") for mode, history in by_mode.items()]
    together = rate(samples, metric.PREEMPTIONS, "Preemptions/s")
    return [] if together is None else [together]


def hit_rate(samples: Sequence[Sample]) -> History | None:
    """Return the hit rate of the prefix cache between samples: tokens found per token looked up."""
    hits, queries = rate(samples, metric.PREFIX_HITS, "prefix hits"), rate(samples, metric.PREFIX_QUERIES)
    return None if hits is None or queries is None else _divide(hits, queries)


def service_shares(samples: Sequence[Sample]) -> list[Share]:
    """Return each tenant's share of the seconds of service between samples, as the server counts them."""
    everyone = rate(samples, metric.TENANT_SERVICE)
    if everyone is None:
        return []
    fair = [_fair_shares(sample) for sample in samples]
    return [
        Share(
            got=_divide(_per_second(service), everyone),
            fair=History(tenant, service.at_s, tuple(shares.get(tenant) for shares in fair)),
        )
        for tenant, service in _by_label(samples, metric.TENANT_SERVICE, "tenant").items()
    ]


def reported(counters: Mapping[str, Counter]) -> dict[str, Counter]:
    """Return the counters of `metric.REPORTED` that grew, and the preemptions even if there were none."""
    names = {series: parse_series(series).name for series in counters}
    return {
        series: counters[series]
        for name in metric.REPORTED
        for series in sorted(counters)
        if names[series] == name and (counters[series].delta or name == metric.PREEMPTIONS)
    }


def _by_label(samples: Sequence[Sample], series: str, label: str) -> dict[str, History]:
    """Return one history for each value of a label, named by that value."""
    found = [totals(sample.values, series, label) for sample in samples]
    at_s = tuple(sample.at_s for sample in samples)
    names = sorted({name for values in found for name in values})
    return {name: History(name, at_s, tuple(values.get(name) for values in found)) for name in names}


def _fair_shares(sample: Sample) -> dict[str, float]:
    """Return the fair share of each tenant that has work."""
    running, waiting, weights = (
        totals(sample.values, name, "tenant")
        for name in (metric.TENANT_RUNNING, metric.TENANT_WAITING, metric.TENANT_WEIGHT)
    )
    busy = {name: weight for name, weight in weights.items() if running.get(name) or waiting.get(name)}
    all_weights = sum(busy.values())
    return {name: weight / all_weights for name, weight in busy.items() if all_weights}


def _per_second(counter: History) -> History:
    """Return the growth per second up to the next reading; None where the counter fell, because it was reset."""
    values: list[float | None] = []
    for (before_s, before), (after_s, after) in pairwise(zip(counter.at_s, counter.values, strict=True)):
        if before is None or after is None or after < before or after_s <= before_s:
            values.append(None)
        else:
            values.append((after - before) / (after_s - before_s))
    return History(counter.name, counter.at_s, (*values, values[-1] if values else None))


def _divide(above: History, below: History) -> History:
    values = (
        None if top is None or not bottom else top / bottom
        for top, bottom in zip(above.values, below.values, strict=True)
    )
    return History(above.name, above.at_s, tuple(values))
