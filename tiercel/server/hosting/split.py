"""The part of a step's report that concerns each front."""

from array import array
from collections.abc import Collection

from msgspec.structs import replace

from tiercel.values.outcome import Gauges
from tiercel.wire.fleet_frames import WINDOW_BITS
from tiercel.wire.frames import Report


def window_of(seq: int) -> int:
    """Return the number of the connection in whose window an id is."""
    return seq >> WINDOW_BITS


def split_report(report: Report, windows: Collection[int]) -> dict[int, Report]:
    """Return the part of each window among `windows` that has one. Gauges concern all of them."""
    seqs: dict[int, array[int]] = {}
    tokens: dict[int, array[int]] = {}
    for seq, token in zip(memoryview(report.seqs).cast("Q"), memoryview(report.tokens).cast("I"), strict=False):
        window = window_of(seq)
        if window not in seqs:
            seqs[window], tokens[window] = array("Q"), array("I")
        seqs[window].append(seq)
        tokens[window].append(token)
    parts: dict[int, Report] = {}
    for window in windows:
        part = Report(
            seqs=seqs[window].tobytes() if window in seqs else b"",
            tokens=tokens[window].tobytes() if window in tokens else b"",
            logprobs=tuple(one for one in report.logprobs if window_of(one.seq) == window),
            prompts=tuple(one for one in report.prompts if window_of(one.seq) == window),
            pooled=tuple(one for one in report.pooled if window_of(one.seq) == window),
            firsts=tuple(one for one in report.firsts if window_of(one.seq) == window),
            finished=tuple(one for one in report.finished if window_of(one.seq) == window),
            gauges=None if report.gauges is None else _gauges(report.gauges, window),
        )
        if part != Report():
            parts[window] = part
    return parts


def _gauges(gauges: Gauges, window: int) -> Gauges:
    if not gauges.sequences:
        return gauges
    return replace(gauges, sequences=tuple(one for one in gauges.sequences if window_of(one.seq) == window))
