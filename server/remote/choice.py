"""The choice of an engine for a request."""

import random
from collections.abc import Sequence
from typing import Protocol

from tiercel.request import Request
from tiercel.server.remote.link import EngineLink


class EngineChoice(Protocol):
    """Chooses among engines that take work; there is at least one."""

    def choose(self, requests: Sequence[Request], engines: Sequence[EngineLink]) -> EngineLink: ...


class LeastUnfinished:
    """Chooses the engine with the fewest unfinished sequences of this front; ties are broken at random."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    def choose(self, requests: Sequence[Request], engines: Sequence[EngineLink]) -> EngineLink:
        """Return an engine for the sequences of one client request."""
        least = min(link.num_unfinished for link in engines)
        return self._draw.choice([link for link in engines if link.num_unfinished == least])
