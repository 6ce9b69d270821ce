"""The stopwatch around a runner, with a manual clock."""

from collections.abc import Iterable

import pytest

from tiercel.engine.measure.stopwatch import Stopwatch
from tiercel.values.clock import ManualClock
from tiercel.values.errors import DeviceError
from tiercel.values.ids import SeqId
from tiercel.values.outcome import StepOutcome
from tiercel.values.plan import StepPlan

PLAN = StepPlan(step=1, nano_batches=())


class SlowFlight:
    """A flight that takes 3 s."""

    plan = PLAN

    def __init__(self, clock: ManualClock, *, fails: bool) -> None:
        self._clock = clock
        self._fails = fails

    def result(self) -> StepOutcome:
        self._clock.advance(3.0)
        if self._fails:
            raise DeviceError("device.step_failed")
        return StepOutcome((7,), nano_batch_ms=(1500.0, 500.0))


class SlowRunner:
    """A runner whose launch takes 2 s."""

    def __init__(self, clock: ManualClock, *, fails: bool = False) -> None:
        self._clock = clock
        self._fails = fails
        self.forgotten: list[SeqId] = []

    def launch(self, plan: StepPlan) -> SlowFlight:
        self._clock.advance(2.0)
        return SlowFlight(self._clock, fails=self._fails)

    def forget(self, seqs: Iterable[SeqId]) -> None:
        self.forgotten += seqs


def test_the_time_of_a_step_is_divided_by_activity() -> None:
    clock = ManualClock()
    stopwatch = Stopwatch(clock)
    runner = stopwatch.watch(SlowRunner(clock))
    stopwatch.begin()
    clock.advance(0.5)  # the plan
    flight = runner.launch(PLAN)
    clock.advance(0.25)  # background copies
    assert flight.result().tokens == (7,)
    assert flight.plan is PLAN
    clock.advance(1.0)  # the commit
    stopwatch.end()
    laps = stopwatch.take()
    parts = laps.plan_s, laps.launch_s, laps.wait_s, laps.commit_s, laps.nano_batch_s
    assert [list(part) for part in parts] == [[0.75], [2.0], [3.0], [1.0], [1.5, 0.5]]
    assert laps.host_s() == [3.75]
    assert stopwatch.take().host_s() == []


def test_a_step_without_a_wait_has_no_commit_time() -> None:
    clock = ManualClock()
    stopwatch = Stopwatch(clock)
    runner = stopwatch.watch(SlowRunner(clock))
    stopwatch.begin()
    runner.launch(PLAN)
    clock.advance(1.0)
    stopwatch.end()
    laps = stopwatch.take()
    assert (list(laps.plan_s), list(laps.wait_s), list(laps.commit_s)) == ([1.0], [0.0], [0.0])


def test_a_turn_without_work_is_not_counted_as_a_step() -> None:
    clock = ManualClock()
    stopwatch = Stopwatch(clock)
    stopwatch.begin()
    clock.advance(1.0)
    stopwatch.begin()
    stopwatch.end()
    assert list(stopwatch.take().plan_s) == [0.0]


def test_failures_pass_through_and_are_timed() -> None:
    clock = ManualClock()
    stopwatch = Stopwatch(clock)
    inner = SlowRunner(clock, fails=True)
    runner = stopwatch.watch(inner)
    stopwatch.begin()
    flight = runner.launch(PLAN)
    with pytest.raises(DeviceError):
        flight.result()
    runner.forget([SeqId(4)])
    stopwatch.end()
    assert list(stopwatch.take().wait_s) == [3.0]
    assert inner.forgotten == [4]
