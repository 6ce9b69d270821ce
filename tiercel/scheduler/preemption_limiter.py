"""The limit on preemptions and restores per step, and the counter that lifts it."""


class PreemptionLimiter:
    """Allows two preemptions and restores per step in total, and no restore in a step that spills. One per step.

    The limits exist for speed. They are lifted while the `StarvationCounter` is starving.
    """

    def __init__(self, *, is_lifted: bool = False, max_switches: int = 2) -> None:
        self.is_lifted = is_lifted
        self._max_switches = max_switches
        self._switches = 0
        self._has_spilled = False

    def may_preempt(self) -> bool:
        return self.is_lifted or self._switches < self._max_switches

    def may_restore(self) -> bool:
        return self.is_lifted or (self._switches < self._max_switches and not self._has_spilled)

    def preempt(self, *, spills: bool) -> None:
        """Count a preemption. `spills`: blocks are copied down first; copies made in the background do not count."""
        self._switches += 1
        self._has_spilled |= spills

    def restore(self) -> None:
        """Count a restore."""
        self._switches += 1


class StarvationCounter:
    """The number of consecutive steps in which the first sequence in the order got no slice.

    The counter does not follow single sequences: if two sequences took turns at the first place, a counter for each
    would never reach its limit.
    """

    def __init__(self, max_steps: int = 8) -> None:
        self._max_steps = max_steps
        self._steps = 0

    @property
    def is_starving(self) -> bool:
        """Whether the first sequence was not served for `max_steps` steps."""
        return self._steps >= self._max_steps

    def step(self, *, was_served: bool) -> None:
        """Count a planned step. `was_served`: the first sequence got a slice or a restore."""
        self._steps = 0 if was_served else self._steps + 1
