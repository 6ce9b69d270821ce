"""Whether the next step is planned while another one runs, or when that has ended. Imports no torch."""

_LEAST_MS = 10.0  # nobody notices waiting for another step that is shorter
_HOST_TIMES = 20.0  # a step of so many times the cost of planning loses at most 1/20 when nothing overlaps
_RISE, _FALL = 0.05, 0.5  # weight of the newest measurement: other work on the machine only ever adds


class Lookahead:
    """Decides how late a step is planned.

    A request that arrives after a step was planned waits for that step as well, because what is sealed is never taken
    back. Planning ahead hides the cost of planning, which counts only where steps are short. So the step behind a long
    one is planned when the long one has ended: a new request waits for one step and not for two.
    """

    def __init__(self) -> None:
        self._host_ms = 0.0  # of planning and launching one step, smoothed

    def launched(self, host_s: float, *, is_alone: bool) -> None:
        """Note the time that planning and launching a step took. `is_alone`: no step ran beside it.

        Beside one that runs it takes longer, because both want the cores: that says at most what it costs alone.
        """
        ms, known_ms = 1e3 * host_s, self._host_ms
        if not known_ms or ms < known_ms:
            self._host_ms += (ms - known_ms) * (_FALL if known_ms else 1.0)
        elif is_alone:
            self._host_ms += (ms - known_ms) * _RISE

    def is_long(self, step_ms: float) -> bool:
        """Return True if a step of this predicted time is to end before the next one is planned."""
        return step_ms >= max(_LEAST_MS, _HOST_TIMES * self._host_ms)
