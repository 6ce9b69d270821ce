"""Two runs side by side: ratios with confidence intervals, and whether a difference may be due to chance."""

from collections.abc import Callable, Iterator, Sequence
from enum import Enum

import msgspec
import numpy as np
from msgspec import Struct

from tiercel.loadtest.results.bootstrap import (
    ConfidenceInterval,
    Floats,
    Sampler,
    grouped_percentile_sampler,
    interval,
    mean_sampler,
    percentile_sampler,
    rounds_for,
)
from tiercel.loadtest.results.latency import gaps_s, is_good, latencies
from tiercel.loadtest.results.record import ClientRecord, RunResult, Timeline
from tiercel.wire.encoding import plain_value

ROUNDS = 2000
_METRICS = ("ttft", "ttft_due", "tpot", "e2el")
_PERCENTS = (50, 90, 99)
_BLOCKS = 20  # of equal time; the rates of neighbouring seconds depend on each other, those of blocks hardly do
_LEAST_STEPS = 2 * _BLOCKS
_LEAST_BEYOND = 5  # samples above a percentile, for an interval of it
_LEAST_SAMPLES = 10


class ComparisonVerdict(Enum):
    """The conclusion about a difference. TIE: the interval of the ratio holds 1. UNKNOWN: there is no interval."""

    BETTER = "better"
    WORSE = "worse"
    TIE = "tie"
    UNKNOWN = "unknown"


class Difference(Struct, frozen=True, kw_only=True):
    """One figure of both runs. The ratio is second / first."""

    figure: str
    tenant: str = ""  # empty: all requests
    first: float
    second: float
    ratio: float | None  # None if the first is zero
    spread: ConfidenceInterval | None  # of the ratio; None if it cannot be computed
    verdict: ComparisonVerdict
    reason: str = ""  # why the verdict is UNKNOWN


class _View(Struct, frozen=True):
    """The compared parts of a run or of one tenant."""

    quantiles: dict[str, list[float]]
    timeline: Timeline
    records: list[ClientRecord]  # requests without an error; empty if the result was saved without requests


class _Side(Struct, frozen=True):
    """A figure of one run: its value, and a sampler of it."""

    value: float
    sampler: Sampler | None
    reason: str = ""  # why there is no sampler


_NOT_KEPT = "saved without --save-detailed"
_TOO_FEW = "too few samples"


def compare(first: RunResult, second: RunResult, *, seed: int = 0, rounds: int = ROUNDS) -> list[Difference]:
    """Return every figure that both runs have, then the latencies of each tenant that both have.

    Cost: a few seconds for ten thousand requests.
    """
    rng = np.random.default_rng(seed)
    views = _whole(first), _whole(second)
    found = [
        *_rates(*views, rng, rounds),
        *_good(first, second, rng, rounds),
        *_latencies(*views, rng, rounds),
        *_gaps(*views, rng, rounds),
    ]
    others = {tenant.name for tenant in second.tenants}
    shared = [tenant.name for tenant in first.tenants if tenant.name in others]
    if len(shared) > 1:
        for name in shared:
            parts = _of_tenant(first, name), _of_tenant(second, name)
            found += [
                msgspec.structs.replace(difference, tenant=name)
                for difference in _latencies(*parts, rng, rounds, ("ttft", "tpot"), (50, 99))
            ]
    return found


def encode_comparison(differences: Sequence[Difference], unlike: dict[str, tuple[str, str]]) -> bytes:
    """Return the comparison as JSON text."""
    return msgspec.json.format(
        msgspec.json.encode({"differing": unlike, "figures": differences}, enc_hook=plain_value), indent=2
    )


def differing_settings(first: RunResult, second: RunResult) -> dict[str, tuple[str, str]]:
    """Return the settings that differ between the runs and may explain a difference, with both values."""
    named: dict[str, Callable[[RunResult], object]] = {
        "model": lambda run: run.model_id,
        "dataset": lambda run: run.dataset,
        "arrivals": lambda run: run.arrivals,
        "prompts": lambda run: run.num_prompts,
        "concurrency": lambda run: run.max_concurrency,
        "seed": lambda run: run.seed,
        "machine": lambda run: ", ".join(run.machine.values()),
        "versions": lambda run: ", ".join(f"{name} {version}" for name, version in run.versions.items()),
    }
    pairs = {name: (f"{read(first)}", f"{read(second)}") for name, read in named.items()}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _whole(run: RunResult) -> _View:
    return _View(run.quantiles, run.timeline, [record for record in run.requests if record.error is None])


def _of_tenant(run: RunResult, name: str) -> _View:
    tenant = next(tenant for tenant in run.tenants if tenant.name == name)
    records = [record for record in run.requests if record.tenant == name and record.error is None]
    return _View(tenant.quantiles, tenant.timeline, records)


def _rates(first: _View, second: _View, rng: np.random.Generator, rounds: int) -> Iterator[Difference]:
    """Compare rates over the run, each as the mean over equal blocks of time."""
    for figure, read in (("output tokens/s", _tokens), ("requests/s", _finished)):
        sides = [_rate(read(view.timeline), view.timeline.step_s, rng) for view in (first, second)]
        yield _difference(figure, sides[0], sides[1], rounds, is_more_better=True)


def _good(first: RunResult, second: RunResult, rng: np.random.Generator, rounds: int) -> Iterator[Difference]:
    """Compare the share of the requests that kept all goals, if both runs have goals."""
    if first.request_goodput is None or second.request_goodput is None:
        return
    sides: list[_Side] = []
    for run in (first, second):
        goals = {tenant.name: tenant.goals for tenant in run.tenants}
        kept = [float(is_good(record, goals.get(record.tenant, run.goals))) for record in run.requests]
        share = (run.request_goodput or 0.0) * run.duration / max(1, run.completed + run.failed)
        is_enough = len(kept) >= _LEAST_SAMPLES
        sides.append(_Side(share, mean_sampler(kept, rng)) if is_enough else _Side(share, None, _NOT_KEPT))
    yield _difference("good share", sides[0], sides[1], rounds, is_more_better=True)


def _tokens(line: Timeline) -> Sequence[float]:
    return line.output_tokens


def _finished(line: Timeline) -> Sequence[float]:
    return line.finished


def _rate(steps: Sequence[float], step_s: float, rng: np.random.Generator) -> _Side:
    value = sum(steps) / (len(steps) * step_s) if steps else 0.0
    if len(steps) < _LEAST_STEPS:
        return _Side(value, None, "the run is too short")
    width = len(steps) // _BLOCKS
    blocks = [sum(steps[start : start + width]) / (width * step_s) for start in range(0, _BLOCKS * width, width)]
    return _Side(value, mean_sampler(blocks, rng))


def _latencies(
    first: _View,
    second: _View,
    rng: np.random.Generator,
    rounds: int,
    metrics: Sequence[str] = _METRICS,
    percents: Sequence[int] = _PERCENTS,
) -> Iterator[Difference]:
    values_ms = [latencies(view.records) for view in (first, second)]
    for metric in metrics:
        if not (_has(first, metric) and _has(second, metric)):
            continue
        for percent in percents:
            sides = [
                _quantile(view.quantiles[metric][percent], values[metric], percent, rng)
                for view, values in zip((first, second), values_ms, strict=True)
            ]
            yield _difference(_figure(percent, metric), sides[0], sides[1], rounds, is_more_better=False)


def _quantile(value: float, values: Sequence[float], percent: float, rng: np.random.Generator) -> _Side:
    if not values:
        return _Side(value, None, _NOT_KEPT)
    if len(values) < _LEAST_SAMPLES or len(values) * (1 - percent / 100) < _LEAST_BEYOND:
        return _Side(value, None, _TOO_FEW)
    return _Side(value, percentile_sampler(values, percent, rng))


def _gaps(first: _View, second: _View, rng: np.random.Generator, rounds: int) -> Iterator[Difference]:
    """Compare the gaps between chunks; whole requests are drawn, each with all its gaps."""
    if not (_has(first, "itl") and _has(second, "itl")):
        return
    groups = [[gaps for record in view.records if (gaps := gaps_s(record))] for view in (first, second)]
    enough = min(rounds_for(group, rounds) for group in groups)
    sides = [
        _gap_tail(view.quantiles["itl"][99], group, rng) for view, group in zip((first, second), groups, strict=True)
    ]
    yield _difference("p99_itl_ms", sides[0], sides[1], enough, is_more_better=False)


def _gap_tail(value: float, groups: Sequence[Sequence[float]], rng: np.random.Generator) -> _Side:
    if not groups:
        return _Side(value, None, _NOT_KEPT)
    if len(groups) < _LEAST_SAMPLES:
        return _Side(value, None, _TOO_FEW)
    return _Side(value, grouped_percentile_sampler(groups, 99, rng))


def _difference(figure: str, first: _Side, second: _Side, rounds: int, *, is_more_better: bool) -> Difference:
    ratio = second.value / first.value if first.value else None
    spread = None
    if ratio is not None and first.sampler is not None and second.sampler is not None:
        spread = interval(_quotients(first.sampler(rounds), second.sampler(rounds), ratio))
    return Difference(
        figure=figure, first=first.value, second=second.value, ratio=ratio, spread=spread,
        verdict=_verdict(spread, is_more_better), reason=first.reason or second.reason,
    )  # fmt: skip


def _quotients(below: Floats, above: Floats, otherwise: float) -> Floats:
    """Return above / below; `otherwise` where the divisor is zero."""
    return np.divide(above, below, out=np.full_like(above, otherwise), where=below != 0)


def _verdict(spread: ConfidenceInterval | None, is_more_better: bool) -> ComparisonVerdict:
    if spread is None:
        return ComparisonVerdict.UNKNOWN
    if spread.low <= 1 <= spread.high:
        return ComparisonVerdict.TIE
    return ComparisonVerdict.BETTER if (spread.low > 1) == is_more_better else ComparisonVerdict.WORSE


def _has(view: _View, metric: str) -> bool:
    return len(view.quantiles.get(metric, [])) == 101


def _figure(percent: int, metric: str) -> str:
    return f"{'median' if percent == 50 else f'p{percent}'}_{metric}_ms"
