"""The CPU time and lag of the client processes, and whether the client was the bottleneck."""

from collections import Counter as Tally
from collections.abc import Sequence

from tiercel.loadtest.client.assignment import Load
from tiercel.loadtest.results.distribution import percentile
from tiercel.loadtest.results.record import ClientLoad

_BUSY_SHARE = 0.9  # of a core
_FREE_SHARE = 0.7  # of a core; a process that uses less is not late because of its own work
_BUSY_PART = 0.1  # part of the seconds above `_BUSY_SHARE` that makes a process busy
_LAG_LIMIT_MS = 20.0
_LATE_PART = 0.01  # part of the requests


def client_load(loads: Sequence[Load], requests: int, duration_s: float, cores: int) -> ClientLoad:
    """Sum up the load of all client processes and decide whether it distorts the figures."""
    lags = sorted(lag for load in loads for lag in load.lags_ms) or [0.0]
    by_second: Tally[int] = Tally()
    for load in loads:
        by_second.update(dict(enumerate(load.chunks_by_second)))
    shares = [sorted(load.cpu_shares) or [0.0] for load in loads]
    busiest = max((percentile(ordered, 100 * (1 - _BUSY_PART)) for ordered in shares), default=0.0)
    lag_ms, late = percentile(lags, 99), sum(load.late_sends for load in loads)
    reasons: list[str] = []
    if busiest > _BUSY_SHARE:
        reasons.append(f"a client process used {busiest:.0%} of a core")
    if lag_ms > _LAG_LIMIT_MS:
        why = "" if busiest > _FREE_SHARE else f" with {busiest:.0%} of a core used: something else has the CPU"
        reasons.append(f"the client's event loop ran {lag_ms:.0f} ms late (P99){why}")
    if requests and late / requests > _LATE_PART:
        reasons.append(f"{late} requests were sent more than 50 ms late")
    chunks = sum(load.chunks for load in loads)
    return ClientLoad(
        processes=len(loads),
        cores=cores,
        cpu_s=sum(load.cpu_s for load in loads),
        busiest_share=busiest,
        chunks=chunks,
        chunks_per_s=chunks / duration_s,
        peak_chunks_per_s=float(max(by_second.values(), default=0)),
        lag_p99_ms=lag_ms,
        lag_max_ms=lags[-1],
        late_sends=late,
        saturated=bool(reasons),
        reason="; ".join(reasons),
    )
