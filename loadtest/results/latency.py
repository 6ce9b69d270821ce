"""Latencies of requests and the figures made of them.

TTFT: first chunk with content, from when the request was sent. TPOT: time behind the first chunk by tokens behind the
first; requests of one token have none. ITL: gaps between chunks, one a gap, all requests together. E2EL: last chunk,
from when the request was sent. `_due`: the same from when the request was due. Only requests without an error count.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from tiercel.loadtest.results.record import METRICS, Goals, RequestRecord

_ALWAYS = (90.0, 95.0, 99.0)
Latencies = Mapping[str, Sequence[float]]
"""Sorted values in ms by metric."""


def ttft_ms(record: RequestRecord) -> float | None:
    return None if record.first_s is None else (record.first_s - record.sent_s) * 1000


def tpot_ms(record: RequestRecord) -> float | None:
    if record.first_s is None or record.output_tokens <= 1:
        return None
    return (record.end_s - record.first_s) * 1000 / (record.output_tokens - 1)


def e2el_ms(record: RequestRecord) -> float:
    return (record.end_s - record.sent_s) * 1000


def gaps_s(record: RequestRecord) -> list[float]:
    """Between its chunks."""
    return [after - before for before, after in pairwise(record.chunks_s)]


def latencies(records: Iterable[RequestRecord]) -> dict[str, list[float]]:
    """Sorted values by metric."""
    found: dict[str, list[float]] = {metric: [] for metric in METRICS}
    for record in records:
        if record.error is not None:
            continue
        waited_ms = (record.sent_s - record.due_s) * 1000
        first_ms, token_ms, whole_ms = ttft_ms(record), tpot_ms(record), e2el_ms(record)
        if first_ms is not None:
            found["ttft"].append(first_ms)
            found["ttft_due"].append(first_ms + waited_ms)
        if token_ms is not None:
            found["tpot"].append(token_ms)
        found["itl"] += [gap_s * 1000 for gap_s in gaps_s(record)]
        found["e2el"].append(whole_ms)
        found["e2el_due"].append(whole_ms + waited_ms)
        found["client_queue_time"].append(waited_ms)
    for values in found.values():
        values.sort()
    return found


def percentile(ordered: Sequence[float], rank: float) -> float:
    """The value at `rank` percent of sorted values, between two of them in a straight line, as numpy does it."""
    place = (len(ordered) - 1) * rank / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def figures(values_by_metric: Latencies, ranks: Iterable[float]) -> dict[str, float | None]:
    """`mean_ttft_ms` and so on; None where no request has the metric."""
    all_ranks = sorted({*ranks, *_ALWAYS})
    found: dict[str, float | None] = {}
    for metric, ordered in values_by_metric.items():
        has_values = bool(ordered)
        found[f"mean_{metric}_ms"] = statistics.fmean(ordered) if has_values else None
        found[f"median_{metric}_ms"] = percentile(ordered, 50) if has_values else None
        found[f"std_{metric}_ms"] = _deviation(ordered) if has_values else None
        for rank in all_ranks:
            found[f"p{rank:g}_{metric}_ms"] = percentile(ordered, rank) if has_values else None
    return found


def quantiles(values_by_metric: Latencies) -> dict[str, list[float]]:
    """The 0th to the 100th percentile of each metric that has values."""
    return {
        metric: [round(percentile(ordered, rank), 3) for rank in range(101)]
        for metric, ordered in values_by_metric.items()
        if ordered
    }


def is_good(record: RequestRecord, goals: Goals) -> bool:
    """Whether a request keeps all goals. A request of one token has no TPOT to miss."""
    if record.error is not None:
        return False
    first_ms = ttft_ms(record)
    if goals.ttft is not None and (first_ms is None or first_ms > goals.ttft):
        return False
    if goals.tpot is not None and (tpot_ms(record) or 0.0) > goals.tpot:
        return False
    return goals.e2el is None or e2el_ms(record) <= goals.e2el


def has_goals(goals: Goals) -> bool:
    return goals != Goals()


def _deviation(ordered: Sequence[float]) -> float:
    mean = statistics.fmean(ordered)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered))
