"""The clocks."""

from tiercel.values.clock import ManualClock, MonotonicClock


def test_the_manual_clock_moves_only_on_advance() -> None:
    clock = ManualClock(start_s=5.0)
    clock.advance(1.5)
    assert clock.now_s() == 6.5


def test_the_real_clock_never_goes_back() -> None:
    clock = MonotonicClock()
    readings = [clock.now_s() for _ in range(100)]
    assert readings == sorted(readings)
