"""The seam between the loop and whatever runs its steps. Imports no torch."""

from collections.abc import Iterable
from typing import Protocol

from tiercel.values.errors import DeviceError
from tiercel.values.ids import SeqId
from tiercel.values.outcome import StepOutcome
from tiercel.values.plan import StepPlan


class Flight(Protocol):
    """A launched step."""

    @property
    def plan(self) -> StepPlan: ...
    def result(self) -> StepOutcome: ...


class RefusedFlight:
    """A step that the device refused at launch. A part of it may run, so it counts as a launched step that fails."""

    def __init__(self, plan: StepPlan, error: DeviceError) -> None:
        self.plan = plan
        self._error = error

    def result(self) -> StepOutcome:
        """Errors: DeviceError, as raised by the launch."""
        raise self._error


class StepRunner(Protocol):
    """Launches sealed steps on a device or on a simulated one.

    A launch that raises DeviceError may have come to any point. The table updates of its plan come again with the next.
    """

    def launch(self, plan: StepPlan) -> Flight: ...
    def forget(self, seqs: Iterable[SeqId]) -> None: ...
