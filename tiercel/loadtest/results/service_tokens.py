"""Service: the work of the server for a request over time, in tokens; the basis of timelines and fairness.

The tokens of the prompt that were not cached count when the first chunk arrives; the tokens of the answer are spread
evenly over its chunks.
"""

from collections.abc import Iterable, Iterator, Sequence

from tiercel.loadtest.results.record import ClientRecord

Interval = tuple[float, float]


def output_pieces(record: ClientRecord) -> Iterator[tuple[float, float]]:
    """Yield (time, output tokens) of every chunk."""
    if record.chunks_s:
        tokens = max(record.output_tokens, len(record.chunks_s) if record.error else 0) / len(record.chunks_s)
        for at_s in record.chunks_s:
            yield at_s, tokens


def service_pieces(record: ClientRecord) -> Iterator[tuple[float, float]]:
    """Yield (time, service tokens) of the prompt and of every chunk."""
    if record.first_s is not None:
        yield record.first_s, float(max(0, record.input_tokens - (record.cached_tokens or 0)))
    yield from output_pieces(record)


def busy(records: Iterable[ClientRecord]) -> list[Interval]:
    """Return the disjoint ordered intervals in which at least one request was due and had not ended."""
    merged: list[Interval] = []
    for began_s, end_s in sorted((min(record.due_s, record.sent_s), record.end_s) for record in records):
        if merged and began_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        else:
            merged.append((began_s, end_s))
    return merged


def both(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two lists of disjoint ordered intervals."""
    shared: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        began_s, end_s = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if began_s < end_s:
            shared.append((began_s, end_s))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return shared


def length_s(intervals: Iterable[Interval]) -> float:
    """Return the total length of intervals."""
    return sum(end_s - began_s for began_s, end_s in intervals)


def largest_gap_s(records: Sequence[ClientRecord]) -> float:
    """Return the longest time in which a request was due or running and nothing arrived."""
    arrivals = sorted(at_s for record in records for at_s in (*record.chunks_s, record.end_s))
    largest = 0.0
    place = 0
    for began_s, end_s in busy(records):
        before_s = began_s
        while place < len(arrivals) and arrivals[place] <= end_s:
            if arrivals[place] > before_s:
                largest = max(largest, arrivals[place] - before_s)
                before_s = arrivals[place]
            place += 1
        largest = max(largest, end_s - before_s)
    return largest
