"""What the engine looks after now and then: rates, and the health of the disk."""

from tiercel.clock import Clock
from tiercel.engine.measure.rate_book import RateBook
from tiercel.engine.memory.tiers import Tiers
from tiercel.kvcache.idle import IdleWork
from tiercel.outcome import DiskState
from tiercel.scheduler.cost import StepCosts

_EVERY_S = 0.5


class Upkeep:
    """Takes measurements home to the rates, and stops what writes to a disk that takes no more."""

    def __init__(self, tiers: Tiers, rates: RateBook, idle: IdleWork, clock: Clock, costs: StepCosts | None) -> None:
        self._tiers = tiers
        self._rates = rates
        self._idle = idle
        self._clock = clock
        self._costs = costs  # of steps, where they were measured
        self._tended_s = 0.0

    def tend(self) -> None:
        """Cost: nothing, most of the time."""
        now_s = self._clock.now_s()
        elapsed_s = now_s - self._tended_s
        if elapsed_s < _EVERY_S:
            return
        self._tended_s = now_s
        disk = self._tiers.disk
        if self._costs is not None:
            self._rates.follow(self._costs)
        self._rates.learn(self._tiers.mover.gauges(), disk.counts if disk is not None else None, elapsed_s)
        disk_state = self._tiers.disk_state
        if disk_state in (DiskState.OFF, DiskState.READ_ONLY):
            self._idle.close_disk(is_readable=disk_state is DiskState.READ_ONLY)
