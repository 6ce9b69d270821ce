"""The overload controller and its service levels."""

from hypothesis import given
from hypothesis import strategies as st

from tiercel.server.tenancy.overload import OverloadControl, OverloadLevel
from tiercel.values.clock import ManualClock


def _fed(
    control: OverloadControl, clock: ManualClock, pressure: float, seconds: float, step_s: float = 0.1
) -> OverloadLevel:
    level = OverloadLevel.FULL
    for _ in range(round(seconds / step_s)):
        clock.advance(step_s)
        level = control.feed(pressure)
    return level


def test_a_moment_of_pressure_changes_nothing() -> None:
    clock = ManualClock()
    control = OverloadControl(clock)
    for _ in range(20):
        assert _fed(control, clock, 5.0, 0.4) is OverloadLevel.FULL
        assert _fed(control, clock, 0.2, 0.2) is OverloadLevel.FULL


def test_two_moments_of_pressure_with_silence_between_them_are_no_lasting_one() -> None:
    clock = ManualClock()
    control = OverloadControl(clock)
    control.feed(5.0)
    clock.advance(100)
    assert control.feed(5.0) is OverloadLevel.FULL
    clock.advance(0.6)
    assert control.feed(5.0) is OverloadLevel.SHORTENED


def test_lasting_pressure_climbs_one_rung_at_a_time_as_far_as_it_is_high() -> None:
    clock = ManualClock()
    control = OverloadControl(clock)
    assert _fed(control, clock, 0.6, 0.7) is OverloadLevel.SHORTENED
    assert _fed(control, clock, 0.6, 60) is OverloadLevel.SHORTENED
    assert _fed(control, clock, 0.9, 0.7) is OverloadLevel.DEFERRED
    assert _fed(control, clock, 9.0, 60) is OverloadLevel.DEFERRED


def test_service_recovers_one_rung_per_calm_period() -> None:
    clock = ManualClock()
    control = OverloadControl(clock)
    assert _fed(control, clock, 2.0, 3) is OverloadLevel.DEFERRED
    assert _fed(control, clock, 0.7, 60) is OverloadLevel.DEFERRED  # below where it climbed, above where it leaves
    assert _fed(control, clock, 0.4, 4.5) is OverloadLevel.DEFERRED
    assert _fed(control, clock, 0.4, 1) is OverloadLevel.SHORTENED
    assert _fed(control, clock, 0.4, 60) is OverloadLevel.SHORTENED
    assert _fed(control, clock, 0.1, 4.5) is OverloadLevel.SHORTENED
    assert _fed(control, clock, 0.1, 1) is OverloadLevel.FULL


def test_pressure_during_the_calm_restarts_the_calm_period() -> None:
    clock = ManualClock()
    control = OverloadControl(clock)
    _fed(control, clock, 0.6, 1)
    for _ in range(10):
        _fed(control, clock, 0.1, 4)
        assert _fed(control, clock, 0.4, 0.2) is OverloadLevel.SHORTENED


def test_no_request_for_a_while_is_calm() -> None:
    clock = ManualClock()
    control = OverloadControl(clock)
    _fed(control, clock, 2.0, 3)
    clock.advance(30)
    assert control.feed(0.0) is OverloadLevel.FULL
    _fed(control, clock, 2.0, 3)
    clock.advance(30)
    assert control.feed(0.9) is OverloadLevel.DEFERRED


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0.01, 3)), max_size=200))
def test_a_rung_is_never_left_within_half_a_second(readings: list[tuple[float, float]]) -> None:
    clock = ManualClock()
    control, moved_s, before = OverloadControl(clock), -1e9, OverloadLevel.FULL
    for pressure, gap_s in readings:
        clock.advance(gap_s)
        level = control.feed(pressure)
        if level is not before:
            assert abs(level - before) == 1
            assert clock.now_s() - moved_s >= 0.5 or moved_s < 0
            assert level < before or pressure >= (0.5, 0.8)[before]
            before, moved_s = level, clock.now_s()
