"""Latencies of single requests.

TTFT: from sending the request to the first chunk with content. TPOT: the time after the first chunk divided by the
number of tokens after the first; a request of one token has none. ITL: the gap between two chunks; a request has as
many values as gaps. E2EL: from sending the request to its last chunk. The metrics that end in `_due` count from when
the request was due. Only requests without an error count.
"""

from collections.abc import Iterable
from itertools import pairwise

from tiercel.loadtest.results.record import METRICS, ClientRecord, Goals


def ttft_ms(record: ClientRecord) -> float | None:
    """Return the time to the first token, or None without one."""
    return None if record.first_s is None else (record.first_s - record.sent_s) * 1000


def tpot_ms(record: ClientRecord) -> float | None:
    """Return the mean time per output token after the first, or None with fewer than two tokens."""
    if record.first_s is None or record.output_tokens <= 1:
        return None
    return (record.end_s - record.first_s) * 1000 / (record.output_tokens - 1)


def e2el_ms(record: ClientRecord) -> float:
    """Return the end-to-end latency."""
    return (record.end_s - record.sent_s) * 1000


def gaps_s(record: ClientRecord) -> list[float]:
    """Return the gaps between the chunks of a request."""
    return [after - before for before, after in pairwise(record.chunks_s)]


def latencies(records: Iterable[ClientRecord]) -> dict[str, list[float]]:
    """Return the sorted values of every metric, in ms."""
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


def is_good(record: ClientRecord, goals: Goals) -> bool:
    """Return whether a request kept all goals. A request of one token keeps any TPOT goal."""
    if record.error is not None:
        return False
    first_ms = ttft_ms(record)
    if goals.ttft is not None and (first_ms is None or first_ms > goals.ttft):
        return False
    if goals.tpot is not None and (tpot_ms(record) or 0.0) > goals.tpot:
        return False
    return goals.e2el is None or e2el_ms(record) <= goals.e2el


def has_goals(goals: Goals) -> bool:
    """Return whether there is any goal."""
    return goals != Goals()
