"""Percentiles and other figures of the latencies of a run.

The percentile p of n values in order lies at the position (n - 1) * p / 100, counted from 0; between two values it is
interpolated linearly. That is numpy's method "linear", the default of most load tests.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

_ALWAYS = (90.0, 95.0, 99.0)
Latencies = Mapping[str, Sequence[float]]
"""Values in ms by metric."""


def percentiles(values: Sequence[float], ranks: Iterable[float]) -> list[float]:
    """Return the percentiles at `ranks`, each from 0 to 100, of at least one value in any order."""
    return [float(found) for found in np.percentile(values, list(ranks), method="linear")]


def percentile(values: Sequence[float], rank: float) -> float:
    """Return the percentile at one rank."""
    return percentiles(values, (rank,))[0]


def figures(values_by_metric: Latencies, ranks: Iterable[float]) -> dict[str, float | None]:
    """Return `mean_ttft_ms`, `median_ttft_ms`, `std_ttft_ms`, `p99_ttft_ms` and so on; None without values."""
    all_ranks = sorted({*ranks, *_ALWAYS})
    found: dict[str, float | None] = {}
    for metric, values in values_by_metric.items():
        has_values = bool(values)
        found[f"mean_{metric}_ms"] = float(np.mean(values)) if has_values else None
        found[f"median_{metric}_ms"] = percentile(values, 50) if has_values else None
        found[f"std_{metric}_ms"] = float(np.std(values)) if has_values else None
        at_ranks = percentiles(values, all_ranks) if has_values else [None] * len(all_ranks)
        found |= {f"p{rank:g}_{metric}_ms": value for rank, value in zip(all_ranks, at_ranks, strict=True)}
    return found


def quantiles(values_by_metric: Latencies) -> dict[str, list[float]]:
    """Return the percentiles 0 to 100 of each metric that has values: 101 numbers, rounded to microseconds."""
    return {
        metric: [round(value, 3) for value in percentiles(values, range(101))]
        for metric, values in values_by_metric.items()
        if values
    }
