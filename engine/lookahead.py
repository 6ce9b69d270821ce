"""The choice whether to plan a step while another one runs, or after it has ended. Imports no torch."""

_MIN_LONG_MS = 10.0  # waiting for a shorter step is not noticeable
_MIN_HOST_RATIO = 50.0  # of a step's time to the cost of planning: without overlap at most 1/50 of the time is lost
_RISE, _FALL = 0.05, 0.5  # weights of the newest measurement: other work on the machine makes it longer, never shorter


class Lookahead:
    """Decides which steps must end before the next one is planned.

    A request that arrives after a step was planned waits for that step as well, because a sealed step is never
    changed. Planning ahead hides the cost of planning, which matters only if steps are short. The step after a long
    one is therefore planned when the long one has ended: a new request waits for one step instead of two.
    """

    def __init__(self) -> None:
        self._host_ms = 0.0  # smoothed time of planning and launching one step

    def launched(self, host_s: float, *, is_alone: bool) -> None:
        """Note the time that planning and launching a step took. `is_alone`: no other step ran meanwhile.

        While a step runs, planning takes longer because both compete for the cores; such a time is an upper bound.
        """
        ms, known_ms = 1e3 * host_s, self._host_ms
        if not known_ms or ms < known_ms:
            self._host_ms += (ms - known_ms) * (_FALL if known_ms else 1.0)
        elif is_alone:
            self._host_ms += (ms - known_ms) * _RISE

    def is_long(self, step_ms: float) -> bool:
        """Return whether a step of this predicted time has to end before the next one is planned."""
        return step_ms >= max(_MIN_LONG_MS, _MIN_HOST_RATIO * self._host_ms)
