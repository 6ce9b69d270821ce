"""The number of threads that compute together, reduced while other processes use the cores.

A parallel region ends when its last thread has ended. If another process occupies the core of one thread, all others
wait for that thread at every region, a hundred times a step; a team with one thread fewer does not wait. Measurements:
docs/decisions/0027.
"""

from tiercel.device.contention import Contention
from tiercel.values.clock import Clock

WINDOW_S = 0.2  # a decision is made after each window
_GAP_S = 0.05  # after a longer pause the window begins anew
# After so much time at a reduced width the full width is tried; each time that it is reduced at once, twice as long.
_FIRST_PROBE_S = 1.0
_LAST_PROBE_S = 16.0
_LEAST_IDLE = 0.75  # idle cores that make the team one thread wider
_SHRINKING = 0.9
_LEAST_WAITING = 0.1


class TeamWidth:
    """The rule: given the waiting and idle time of a window, the number of threads for the next."""

    def __init__(self, threads: int) -> None:
        """`threads`: the width on a quiet machine."""
        self.threads = threads
        self.width = threads
        self._reduced_s = 0.0
        self._probe_s = _FIRST_PROBE_S
        self._is_probing = False

    def adjust(self, window_s: float, waited_s: float, idle_s: float | None) -> int:
        """Return the new width.

        `waited_s`: time without a core, summed over the team; `idle_s`: summed over the cores, None if unknown. While
        one thread waits, the others wait for it. Thus waiting costs the team waited / window of its speed, and a
        thread fewer costs it at most 1 / width.
        """
        waiting = waited_s / window_s
        if waiting > max(_LEAST_WAITING, _SHRINKING / self.width):
            self._probe_s = min(2 * self._probe_s, _LAST_PROBE_S) if self._is_probing else _FIRST_PROBE_S
            self._is_probing = False
            self._resize(max(1, self.width - max(1, round(waiting))))
        elif self.width < self.threads:
            self._reduced_s += window_s
            idle = 0 if idle_s is None else int(idle_s / window_s + 1 - _LEAST_IDLE)
            if idle:
                self._resize(min(self.threads, self.width + idle))
            elif self._reduced_s >= self._probe_s:
                # The cores may be used by processes of a lower priority or of a lower share, or idle time is unknown.
                self._is_probing = True
                self._resize(self.threads)
        else:
            self._is_probing = False
        return self.width

    def _resize(self, width: int) -> None:
        self.width = width
        self._reduced_s = 0.0


class Team:
    """Watches the jobs of the compute lane. All calls are made by the lane's thread."""

    def __init__(self, threads: int, contention: Contention, clock: Clock) -> None:
        self._rule = TeamWidth(threads)
        self._contention = contention
        self._clock = clock
        self._began_s: float | None = None  # the start of the window
        self._ended_s = 0.0  # the end of the last job

    @property
    def width(self) -> int:
        """The number of threads for the next job."""
        return self._rule.width

    def begin(self) -> None:
        """A job begins."""
        now_s = self._clock.now_s()
        if self._began_s is None or now_s - self._ended_s > _GAP_S:
            self._contention.waited_s()
            self._open_window(now_s)

    def end(self) -> bool:
        """A job has ended. Return whether the width has changed."""
        self._ended_s = now_s = self._clock.now_s()
        if self._began_s is None or now_s - self._began_s < WINDOW_S:
            return False
        before, window_s = self._rule.width, now_s - self._began_s
        waited_s = self._contention.waited_s()
        if waited_s is not None:
            idle_s = self._contention.idle_s() if before < self._rule.threads else None
            self._rule.adjust(window_s, waited_s, idle_s)
        self._open_window(now_s)
        return self._rule.width != before

    def _open_window(self, now_s: float) -> None:
        self._began_s = now_s
        if self._rule.width < self._rule.threads:
            self._contention.idle_s()
