"""The text of a /metrics page, and the names of its series."""

import re
from collections.abc import Iterator
from functools import lru_cache

from msgspec import Struct

_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_LINE = re.compile(r"([a-zA-Z_:][\w:]*(?:\{.*\})?)\s+(\S+)(?:\s+-?\d+)?\s*")
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


class Series(Struct, frozen=True):
    """The name and labels of one series."""

    name: str
    labels: dict[str, str]


@lru_cache(maxsize=65_536)
def parse_series(key: str) -> Series:
    """Read `name{label="value"}`."""
    name, _, labels = key.partition("{")
    return Series(name, {label: _unescape(value) for label, value in _LABEL.findall(labels)})


def parse_exposition(text: str) -> dict[str, float]:
    """Value by series, as the page writes it. Lines that are no number are passed over."""
    return dict(_values(text))


def _values(text: str) -> Iterator[tuple[str, float]]:
    for line in text.splitlines():
        match = None if line.startswith("#") else _LINE.fullmatch(line.strip())
        if match is None:
            continue
        try:
            yield match[1], float(match[2])
        except ValueError:
            continue


def _unescape(value: str) -> str:
    return re.sub(r'\\[\\"n]', lambda match: _ESCAPES[match[0]], value)
