"""Timing of device work."""

from tiercel.device.cpu import InlineLane
from tiercel.values.clock import ManualClock


def test_a_lane_that_computes_itself_is_timed_by_the_clock() -> None:
    clock = ManualClock(5.0)
    timer = InlineLane().start_timer(clock)
    clock.advance(0.25)
    timer.stop()
    clock.advance(1.0)
    assert timer.ms() == 250.0
