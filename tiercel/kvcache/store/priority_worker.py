"""A thread that does pieces of work, the most urgent first."""

import heapq
import itertools
import threading
from collections.abc import Callable

from tiercel.device.processors import lower_priority

Work = Callable[[], bool]
"""Does one piece of work and returns True as long as there is more. Must not raise."""

_CLOSE_S = 5.0


class PriorityWorker:
    """A thread that does one piece at a time: more urgent work overtakes after one piece. `push` never blocks."""

    def __init__(self, name: str, *, is_background: bool = False) -> None:
        """`is_background`: the thread gets a low priority, because no request waits for its work."""
        self._name = name
        self._is_background = is_background
        self._queue: list[tuple[int, int, Work]] = []  # a heap of (priority, arrival, work)
        self._arrivals = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def push(self, priority: int, work: Work) -> None:
        """Queue work: lower numbers first, equal ones in order of arrival. The first push starts the thread."""
        with self._changed:
            if self._is_closed:
                return
            heapq.heappush(self._queue, (priority, next(self._arrivals), work))
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End after the current piece; queued work is dropped."""
        with self._changed:
            self._is_closed = True
            self._queue.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        if self._is_background:
            lower_priority()
        entry = None
        while True:
            with self._changed:
                if entry is not None:
                    heapq.heappush(self._queue, entry)
                while not self._queue and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                entry = heapq.heappop(self._queue)
            if not entry[2]():
                entry = None
