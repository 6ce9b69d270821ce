"""The division of a server's work among the tenants, measured by the client."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import combinations

from tiercel.loadtest.results.record import ClientRecord, Fairness
from tiercel.loadtest.results.service_tokens import Interval, both, busy, largest_gap_s, length_s, service_pieces

RecordsByTenant = Mapping[str, Sequence[ClientRecord]]


def jain_index(values: Sequence[float]) -> float:
    """Return Jain's fairness index: 1 if all values are equal, 1/n if one has everything, 1 if all are zero."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def contended(records_by_tenant: RecordsByTenant) -> list[Interval]:
    """Return the intervals in which every tenant had work."""
    first, *others = [busy(records) for records in records_by_tenant.values()]
    for other in others:
        first = both(first, other)
    return first


def service_within(records: Sequence[ClientRecord], intervals: Sequence[Interval]) -> float:
    """Return the service tokens that arrived inside the intervals."""
    ends = [end_s for _, end_s in intervals]
    total = 0.0
    for record in records:
        for at_s, tokens in service_pieces(record):
            place = bisect_left(ends, at_s)
            if place < len(intervals) and at_s >= intervals[place][0]:
                total += tokens
    return total


def fairness(records_by_tenant: RecordsByTenant, weights: Mapping[str, float]) -> Fairness:
    """Return the fairness figures of a run of at least two tenants."""
    shared = contended(records_by_tenant)
    whole = [(float("-inf"), float("inf"))]
    gaps = {name: largest_gap_s(records) for name, records in records_by_tenant.items()}
    worst = max(gaps, key=lambda name: gaps[name])

    def index(intervals: Sequence[Interval]) -> float:
        return jain_index(
            [service_within(records, intervals) / weights[name] for name, records in records_by_tenant.items()]
        )

    return Fairness(
        jain_index=index(shared or whole),
        jain_index_whole_run=index(whole),
        contended_s=length_s(shared),
        largest_gap_s=gaps[worst],
        largest_gap_tenant=worst,
        largest_difference_tokens=max(
            (
                _difference(records_by_tenant[left], weights[left], records_by_tenant[right], weights[right])
                for left, right in combinations(records_by_tenant, 2)
            ),
            default=0.0,
        ),
    )


def _difference(
    left: Sequence[ClientRecord], left_weight: float, right: Sequence[ClientRecord], right_weight: float
) -> float:
    """Return the largest gain of one tenant over the other in service/weight over any time in which both had work."""
    shared = both(busy(left), busy(right))
    pieces = [(at_s, tokens / left_weight) for record in left for at_s, tokens in service_pieces(record)]
    pieces += [(at_s, -tokens / right_weight) for record in right for at_s, tokens in service_pieces(record)]
    pieces.sort()
    place, largest = 0, 0.0
    for began_s, end_s in shared:
        lead = lowest = highest = 0.0
        while place < len(pieces) and pieces[place][0] < began_s:
            place += 1
        while place < len(pieces) and pieces[place][0] <= end_s:
            lead += pieces[place][1]
            lowest, highest = min(lowest, lead), max(highest, lead)
            place += 1
        largest = max(largest, highest - lowest)
    return largest
