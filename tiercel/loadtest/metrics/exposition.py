"""Reads /metrics pages: Prometheus text to values by series, and the selection of series."""

import math
import re
from collections.abc import Mapping
from functools import lru_cache

from msgspec import Struct

_LABELS = r'\{(?:[^"{}]|"(?:[^"\\]|\\.)*")*\}'
_LINE = re.compile(rf"([a-zA-Z_:][\w:]*(?:{_LABELS})?)\s+(\S+)")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}

Values = Mapping[str, float]
"""Values by series, with the series as the page writes it: `name{label="value"}`."""


class Series(Struct, frozen=True):
    """The name and labels of one series."""

    name: str
    labels: dict[str, str]


class Exposition(Struct, frozen=True):
    """The content of one page."""

    values: dict[str, float]
    counters: frozenset[str]  # the series that are counters


def parse_exposition(text: str) -> Exposition:
    """Parse a page. Lines without a series and a number are skipped, so that any other page gives no values."""
    values: dict[str, float] = {}
    counting: set[str] = set()
    for line in text.splitlines():
        if line.startswith("#"):
            words = line.split()
            if words[1:2] == ["TYPE"] and words[3:] == ["counter"]:
                counting |= {words[2], f"{words[2]}_total"}
        elif (match := _LINE.match(line)) is not None and (value := _number(match[2])) is not None:
            values[match[1]] = value
    return Exposition(values, frozenset(key for key in values if parse_series(key).name in counting))


@lru_cache(maxsize=65_536)
def parse_series(key: str) -> Series:
    """Parse `name{label="value"}`."""
    name, _, labels = key.partition("{")
    return Series(name, {label: _unescape(value) for label, value in _LABEL.findall(labels)})


def select(values: Values, name: str, **labels: str) -> dict[str, float]:
    """Return the series of one name that have all these labels."""
    return {
        key: value
        for key, value in values.items()
        if key.startswith(name)
        and (series := parse_series(key)).name == name
        and labels.items() <= series.labels.items()
    }


def total(values: Values, name: str) -> float | None:
    """Return the sum over the series of one name, or None without such a series."""
    found = select(values, name)
    return math.fsum(found.values()) if found else None


def totals(values: Values, name: str, label: str) -> dict[str, float]:
    """Return the sums over the series of one name by the value of a label, in the order of the values."""
    found: dict[str, float] = {}
    for key, value in select(values, name).items():
        if (label_value := parse_series(key).labels.get(label)) is not None:
            found[label_value] = found.get(label_value, 0.0) + value
    return dict(sorted(found.items()))


def _number(word: str) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return None if math.isnan(value) else value


def _unescape(value: str) -> str:
    return re.sub(r'\\[\\"n]', lambda match: _ESCAPES[match[0]], value)
