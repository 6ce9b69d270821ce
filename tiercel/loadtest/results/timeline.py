"""A run in steps of equal length, for charts and peaks."""

import math
from collections.abc import Iterable, Sequence

from tiercel.loadtest.results.record import ClientRecord, Timeline
from tiercel.loadtest.results.service_tokens import output_pieces, service_pieces

_STEPS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_FEW, _MANY = 20, 3600  # steps of a timeline


def step_for(duration_s: float) -> float:
    """Return the length of a step: one second, unless that makes very few or very many steps."""
    if duration_s >= _FEW:
        return next((step for step in _STEPS_S if step >= 1 and duration_s / step <= _MANY), _STEPS_S[-1])
    return next((step for step in reversed(_STEPS_S[:4]) if duration_s / step >= _FEW), _STEPS_S[0])


def timeline(records: Sequence[ClientRecord], duration_s: float, step_s: float) -> Timeline:
    """Return the timeline of a run."""
    steps = _count(duration_s, step_s)
    finished, failed = [0] * steps, [0] * steps
    for record in records:
        place = min(steps - 1, int(record.end_s / step_s))
        if record.error is None:
            finished[place] += 1
        else:
            failed[place] += 1
    pieces = (piece for record in records for piece in output_pieces(record))
    return Timeline(
        step_s=step_s,
        output_tokens=_binned(pieces, steps, step_s),
        finished=finished,
        failed=failed,
        running=_level(((record.sent_s, record.end_s) for record in records), steps, step_s),
        queued=_level(((record.due_s, record.sent_s) for record in records), steps, step_s),
    )


def service_by_step(records: Sequence[ClientRecord], duration_s: float, step_s: float) -> list[float]:
    """Return the service tokens in each step."""
    pieces = (piece for record in records for piece in service_pieces(record))
    return _binned(pieces, _count(duration_s, step_s), step_s)


def peak_output_tokens_per_s(records: Sequence[ClientRecord], duration_s: float) -> float:
    """Return the output tokens in the best second; of a shorter run, its mean rate."""
    pieces = (piece for record in records if record.error is None for piece in output_pieces(record))
    return max(_binned(pieces, _count(duration_s, 1.0), 1.0)) / min(1.0, duration_s)


def peak_running(records: Iterable[ClientRecord]) -> int:
    """Return the largest number of requests in flight at one time."""
    changes = sorted(change for record in records for change in ((record.sent_s, 1), (record.end_s, -1)))
    running = peak = 0
    for _, change in changes:
        running += change
        peak = max(peak, running)
    return peak


def _count(duration_s: float, step_s: float) -> int:
    return max(1, math.ceil(round(duration_s / step_s, 6)))


def _binned(pieces: Iterable[tuple[float, float]], steps: int, step_s: float) -> list[float]:
    bins = [0.0] * steps
    for at_s, amount in pieces:
        bins[min(steps - 1, max(0, int(at_s / step_s)))] += amount
    return [round(amount, 3) for amount in bins]


def _level(intervals: Iterable[tuple[float, float]], steps: int, step_s: float) -> list[float]:
    """Return the number of intervals that cover the start of each step."""
    changes = [0] * (steps + 1)
    for began_s, end_s in intervals:
        first, behind = math.ceil(began_s / step_s), math.ceil(end_s / step_s)
        if first < behind:
            changes[min(steps, max(0, first))] += 1
            changes[min(steps, max(0, behind))] -= 1
    level = 0
    levels: list[float] = []
    for change in changes[:steps]:
        level += change
        levels.append(float(level))
    return levels
