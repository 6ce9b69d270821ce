"""Idle connections: heads of requests that never end, and closed connections whose client does not read."""

import asyncio
from collections.abc import Iterable
from typing import Protocol

from msgspec import Struct

from tiercel.values.clock import Clock

_SWEEPS_PER_LIMIT = 4


class Cycle(Protocol):
    """One request and its response, as uvicorn keeps it."""

    response_complete: bool


class UvicornConnection(Protocol):
    """One client connection of uvicorn."""

    @property
    def cycle(self) -> Cycle | None: ...

    @property
    def transport(self) -> asyncio.Transport: ...


class _Idle(Struct, frozen=True):
    """A connection that was idle or closing at an earlier sweep."""

    cycle: Cycle | None
    since_s: float


class Reaper:
    """Aborts connections that have been idle or closing for `limit_s`.

    uvicorn's keep-alive timer is stopped by the first byte of the next request, and a closing connection waits
    without limit for a client that does not read.
    """

    def __init__(self, clock: Clock, limit_s: float) -> None:
        self._clock = clock
        self._limit_s = limit_s
        self._idle_by_connection: dict[UvicornConnection, _Idle] = {}

    async def run(self, connections: Iterable[UvicornConnection]) -> None:
        """Sweep until cancelled; `connections` is iterated again each time."""
        while True:
            await asyncio.sleep(self._limit_s / _SWEEPS_PER_LIMIT)
            self.sweep(connections)

    def sweep(self, connections: Iterable[UvicornConnection]) -> None:
        """Abort the connections that have been idle for too long."""
        now_s = self._clock.now_s()
        idle_by_connection: dict[UvicornConnection, _Idle] = {}
        for connection in list(connections):
            cycle = connection.cycle
            if not connection.transport.is_closing() and cycle is not None and not cycle.response_complete:
                continue
            before = self._idle_by_connection.get(connection)
            idle = before if before is not None and before.cycle is cycle else _Idle(cycle, now_s)
            if now_s - idle.since_s >= self._limit_s:
                connection.transport.abort()
            idle_by_connection[connection] = idle
        self._idle_by_connection = idle_by_connection
