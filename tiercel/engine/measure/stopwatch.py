"""Measure the time of the loop's thread by activity: planning, launching, waiting, committing. Imports no torch."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from tiercel.engine.step.flight import Flight, StepRunner
from tiercel.values.clock import Clock
from tiercel.values.ids import SeqId
from tiercel.values.outcome import StepOutcome
from tiercel.values.plan import StepPlan


def _seconds() -> "array[float]":
    return array("d")


@dataclass(frozen=True, slots=True)
class Laps:
    """Seconds of each step by activity of the thread, one entry per step in each array.

    `plan_s` is everything before the wait except the launch: landings, plan, seal, starting transfers. `commit_s` is
    everything after the wait: commit and report.
    """

    plan_s: "array[float]" = field(default_factory=_seconds)
    launch_s: "array[float]" = field(default_factory=_seconds)
    wait_s: "array[float]" = field(default_factory=_seconds)
    commit_s: "array[float]" = field(default_factory=_seconds)
    nano_batch_s: "array[float]" = field(default_factory=_seconds)  # device time, one entry per nano-batch

    def host_s(self) -> list[float]:
        """Return the time of each step without waiting."""
        parts = zip(self.plan_s, self.launch_s, self.commit_s, strict=True)
        return [plan + launch + commit for plan, launch, commit in parts]


class Stopwatch:
    """Times the steps of one loop. The caller of the loop marks begin and end of a step; `watch` measures the rest.

    Cost: six looks at the clock per step.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._laps = Laps()
        self._lap_s = 0.0  # when the current lap began
        self._plan_s = self._launch_s = self._wait_s = 0.0  # of the current step
        self._has_waited = False

    def watch(self, runner: StepRunner) -> StepRunner:
        """Return a runner whose launches and flights are timed."""
        return _WatchedRunner(runner, self)

    def begin(self) -> None:
        """Start timing a step."""
        self._plan_s = self._launch_s = self._wait_s = 0.0
        self._has_waited = False
        self._lap_s = self._clock.now_s()

    def end(self) -> None:
        """End the step and count it."""
        rest_s = self._lap()
        self._laps.plan_s.append(self._plan_s if self._has_waited else self._plan_s + rest_s)
        self._laps.launch_s.append(self._launch_s)
        self._laps.wait_s.append(self._wait_s)
        self._laps.commit_s.append(rest_s if self._has_waited else 0.0)

    def take(self) -> Laps:
        """Return the laps since the last call, and start new ones."""
        laps, self._laps = self._laps, Laps()
        return laps

    def launch(self, runner: StepRunner, plan: StepPlan) -> Flight:
        """Launch the current step. Errors: those of the runner."""
        self._plan_s += self._lap()
        try:
            return runner.launch(plan)
        finally:
            self._launch_s += self._lap()

    def result(self, flight: Flight) -> StepOutcome:
        """Wait for a flight. Errors: those of the flight."""
        self._plan_s += self._lap()
        try:
            outcome = flight.result()
        finally:
            self._wait_s += self._lap()
            self._has_waited = True
        self._laps.nano_batch_s.extend(ms / 1e3 for ms in outcome.nano_batch_ms)
        return outcome

    def _lap(self) -> float:
        """Return the seconds since the last call, and start a new lap."""
        began_s, self._lap_s = self._lap_s, self._clock.now_s()
        return self._lap_s - began_s


class _WatchedRunner:
    """A runner whose launches are timed."""

    def __init__(self, runner: StepRunner, stopwatch: Stopwatch) -> None:
        self._runner = runner
        self._stopwatch = stopwatch

    def launch(self, plan: StepPlan) -> Flight:
        return _WatchedFlight(self._stopwatch.launch(self._runner, plan), self._stopwatch)

    def forget(self, seqs: Iterable[SeqId]) -> None:
        self._runner.forget(seqs)


class _WatchedFlight:
    """A flight whose wait is timed."""

    def __init__(self, flight: Flight, stopwatch: Stopwatch) -> None:
        self._flight = flight
        self._stopwatch = stopwatch

    @property
    def plan(self) -> StepPlan:
        return self._flight.plan

    def result(self) -> StepOutcome:
        return self._stopwatch.result(self._flight)
