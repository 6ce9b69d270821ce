"""The periodic work of an engine: correct the rates, and stop writing to a disk that has failed."""

from tiercel.engine.measure.rate_book import RateBook
from tiercel.engine.memory.tiers import Tiers
from tiercel.kvcache.background import BackgroundWork
from tiercel.scheduler.cost import StepCosts
from tiercel.values.clock import Clock
from tiercel.values.outcome import DiskState

_INTERVAL_S = 0.5


class Upkeep:
    """Passes measurements to the rate book, and closes the disk for background copies once it accepts no writes."""

    def __init__(
        self, tiers: Tiers, rates: RateBook, idle: BackgroundWork, clock: Clock, costs: StepCosts | None
    ) -> None:
        self._tiers = tiers
        self._rates = rates
        self._idle = idle
        self._clock = clock
        self._costs = costs  # of steps; None if step times are not measured
        self._tended_s = 0.0

    def tend(self) -> None:
        """Do the work if the last time was half a second ago. Cost: one look at the clock otherwise."""
        now_s = self._clock.now_s()
        elapsed_s = now_s - self._tended_s
        if elapsed_s < _INTERVAL_S:
            return
        self._tended_s = now_s
        disk = self._tiers.disk
        if self._costs is not None:
            self._rates.follow(self._costs)
        self._rates.learn(self._tiers.mover.gauges(), disk.counts if disk is not None else None, elapsed_s)
        disk_state = self._tiers.disk_state
        if disk_state in (DiskState.OFF, DiskState.READ_ONLY):
            self._idle.close_disk(is_readable=disk_state is DiskState.READ_ONLY)
