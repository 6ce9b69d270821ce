from hypothesis import given
from hypothesis import strategies as st

from tiercel.clock import ManualClock
from tiercel.server.tenancy.ladder import Ladder, Rung


def _fed(ladder: Ladder, clock: ManualClock, pressure: float, seconds: float, step_s: float = 0.1) -> Rung:
    for _ in range(round(seconds / step_s)):
        clock.advance(step_s)
        ladder.feed(pressure)
    return ladder.rung


def test_a_moment_of_pressure_changes_nothing() -> None:
    clock = ManualClock()
    ladder = Ladder(clock)
    for _ in range(20):
        assert _fed(ladder, clock, 5.0, 0.4) is Rung.FULL
        assert _fed(ladder, clock, 0.2, 0.2) is Rung.FULL


def test_two_moments_of_pressure_with_silence_between_them_are_no_lasting_one() -> None:
    clock = ManualClock()
    ladder = Ladder(clock)
    ladder.feed(5.0)
    clock.advance(100)
    assert ladder.feed(5.0) is Rung.FULL
    clock.advance(0.6)
    assert ladder.feed(5.0) is Rung.SHORTENED


def test_lasting_pressure_climbs_one_rung_at_a_time_as_far_as_it_is_high() -> None:
    clock = ManualClock()
    ladder = Ladder(clock)
    assert _fed(ladder, clock, 0.6, 0.7) is Rung.SHORTENED
    assert _fed(ladder, clock, 0.6, 60) is Rung.SHORTENED
    assert _fed(ladder, clock, 0.9, 0.7) is Rung.DEFERRED
    assert _fed(ladder, clock, 9.0, 60) is Rung.DEFERRED


def test_service_comes_back_rung_by_rung_after_calm_and_not_in_between() -> None:
    clock = ManualClock()
    ladder = Ladder(clock)
    assert _fed(ladder, clock, 2.0, 3) is Rung.DEFERRED
    assert _fed(ladder, clock, 0.7, 60) is Rung.DEFERRED  # below where it climbed, above where it leaves
    assert _fed(ladder, clock, 0.4, 4.5) is Rung.DEFERRED
    assert _fed(ladder, clock, 0.4, 1) is Rung.SHORTENED
    assert _fed(ladder, clock, 0.4, 60) is Rung.SHORTENED
    assert _fed(ladder, clock, 0.1, 4.5) is Rung.SHORTENED
    assert _fed(ladder, clock, 0.1, 1) is Rung.FULL


def test_pressure_in_the_calm_starts_it_anew() -> None:
    clock = ManualClock()
    ladder = Ladder(clock)
    _fed(ladder, clock, 0.6, 1)
    for _ in range(10):
        _fed(ladder, clock, 0.1, 4)
        assert _fed(ladder, clock, 0.4, 0.2) is Rung.SHORTENED


def test_no_request_for_a_while_is_calm() -> None:
    clock = ManualClock()
    ladder = Ladder(clock)
    _fed(ladder, clock, 2.0, 3)
    clock.advance(30)
    assert ladder.feed(0.0) is Rung.FULL
    _fed(ladder, clock, 2.0, 3)
    clock.advance(30)
    assert ladder.feed(0.9) is Rung.DEFERRED


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0.01, 3)), max_size=200))
def test_a_rung_is_never_left_within_half_a_second(readings: list[tuple[float, float]]) -> None:
    clock = ManualClock()
    ladder, moved_s, before = Ladder(clock), -1e9, Rung.FULL
    for pressure, gap_s in readings:
        clock.advance(gap_s)
        rung = ladder.feed(pressure)
        if rung is not before:
            assert abs(rung - before) == 1
            assert clock.now_s() - moved_s >= 0.5 or moved_s < 0
            assert rung < before or pressure >= (0.5, 0.8)[before]
            before, moved_s = rung, clock.now_s()
