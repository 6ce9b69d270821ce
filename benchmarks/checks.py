"""The checks at the end of a benchmark, and percentiles for its tables."""

from collections.abc import Iterable

import numpy as np


def missed_checks(checks: Iterable[tuple[str, bool]]) -> list[str]:
    """Print each check, a text and whether it is met. Return the texts of those that are not."""
    missed: list[str] = []
    for text, is_met in checks:
        print(f"  {'ok    ' if is_met else 'MISSED'} {text}")
        if not is_met:
            missed.append(text)
    return missed


def percentile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed; 0 without values."""
    ordered = list(values)
    return float(np.percentile(ordered, 100 * share, method="inverted_cdf")) if ordered else 0.0
