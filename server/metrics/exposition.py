"""Prometheus text by hand, for families of many lines: prometheus_client takes ten times as long for them.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

import time
from collections.abc import Iterable
from functools import cache
from typing import Literal

from prometheus_client.utils import floatToGoString  # pyright: ignore[reportUnknownVariableType] - half typed

from tiercel.server.metrics.histogram import HistogramCounter

Kind = Literal["counter", "gauge", "histogram", "summary"]

_LONG = 4096  # characters: 0.1 ms of writing


def labels(**values: str) -> str:
    """Names and values as they stand between the braces, in order of the names."""
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(values.items()))


def head(name: str, kind: Kind, text: str) -> str:
    """What stands above the samples of a family."""
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"


def single(name: str, kind: Kind, text: str, value: float) -> str:
    """A family of one sample without labels."""
    return f"{head(name, kind, text)}{name} {value}\n"


def family(name: str, kind: Kind, text: str, samples: Iterable[tuple[str, float]]) -> str:
    """A family of samples: labels and value."""
    return head(name, kind, text) + "".join(f"{name}{{{of}}} {value}\n" for of, value in samples)


def histogram(name: str, text: str, tallies: Iterable[tuple[str, HistogramCounter]]) -> str:
    """A family of histograms: labels and tally."""
    return head(name, "histogram", text) + "".join(_buckets(name, of, tally) for of, tally in tallies)


def summary(name: str, text: str, tallies: Iterable[tuple[str, HistogramCounter]]) -> str:
    """The same without buckets: sum and count alone."""
    return head(name, "summary", text) + "".join(_sums(name, of, tally.sum, tally.count) for of, tally in tallies)


def joined(pieces: Iterable[str]) -> str:
    """All of them. After a long one another thread may have the interpreter."""
    written: list[str] = []
    for piece in pieces:
        written.append(piece)
        if len(piece) > _LONG:
            time.sleep(0)
    return "".join(written)


@cache
def _bound(value: float) -> str:
    """As Go and prometheus_client write it, 1e+06 for a million. There are few of them."""
    return floatToGoString(value)


def _buckets(name: str, of: str, tally: HistogramCounter) -> str:
    below = tally.below()
    lines = "".join(f'{name}_bucket{{le="{_bound(bound)}",{of}}} {count}\n' for bound, count in below[:-1])
    count = below[-1][1]
    return f'{lines}{name}_bucket{{le="+Inf",{of}}} {count}\n{_sums(name, of, tally.sum, count)}'


def _sums(name: str, of: str, total: float, count: int) -> str:
    return f"{name}_sum{{{of}}} {total}\n{name}_count{{{of}}} {count}\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
