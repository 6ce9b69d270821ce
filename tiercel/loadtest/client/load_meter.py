"""The load of a client process itself: CPU and chunks per second, and how late its event loop runs."""

import asyncio
import resource
from collections.abc import Callable

from tiercel.values.clock import Clock

_EVERY_S = 0.02
_WINDOW_S = 1.0


class LoadMeter:
    """Measures the process until it is stopped. Cost: a timer every 20 ms."""

    def __init__(self, clock: Clock, chunks: Callable[[], int]) -> None:
        self.cpu_shares: list[float] = []
        self.chunks_by_second: list[int] = []
        self.lags_ms: list[float] = []
        self._clock = clock
        self._chunks = chunks
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = self._window_s = 0.0
        self._began_cpu_s = self._window_cpu_s = 0.0
        self._window_chunks = 0

    @property
    def cpu_s(self) -> float:
        """CPU seconds since the start."""
        return _cpu_s() - self._began_cpu_s

    def start(self) -> None:
        """Start measuring; needs a running event loop."""
        self._window_s = self._clock.now_s()
        self._began_cpu_s = self._window_cpu_s = _cpu_s()
        self._arm()

    def stop(self) -> None:
        """Stop measuring. The last window counts if it is longer than half a window, or the only one."""
        if self._timer is not None:
            self._timer.cancel()
        if self._clock.now_s() - self._window_s > _WINDOW_S / 2 or not self.cpu_shares:
            self._close_window(self._clock.now_s())

    def _arm(self) -> None:
        self._due_s = self._clock.now_s() + _EVERY_S
        self._timer = asyncio.get_running_loop().call_later(_EVERY_S, self._read)

    def _read(self) -> None:
        now_s = self._clock.now_s()
        self.lags_ms.append(max(0.0, now_s - self._due_s) * 1000)
        if now_s - self._window_s >= _WINDOW_S:
            self._close_window(now_s)
        self._arm()

    def _close_window(self, now_s: float) -> None:
        cpu_s, chunks, length_s = _cpu_s(), self._chunks(), max(now_s - self._window_s, 1e-6)
        self.cpu_shares.append((cpu_s - self._window_cpu_s) / length_s)
        self.chunks_by_second.append(round((chunks - self._window_chunks) / length_s))
        self._window_s, self._window_cpu_s, self._window_chunks = now_s, cpu_s, chunks


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
