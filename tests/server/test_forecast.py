import pytest

from server.forecast import Forecast


def test_nothing_is_foretold_before_anything_is_known() -> None:
    forecast = Forecast()
    forecast.note_first_token(1.0, None)
    forecast.note_step(0, 10.0)
    assert forecast.ttft_s(1000) is None
    assert forecast.tokens_per_s is None


def test_the_speed_follows_what_was_computed_under_load() -> None:
    forecast = Forecast()
    for _ in range(100):
        forecast.note_step(100, 0.1)
    assert forecast.tokens_per_s == pytest.approx(1000)
    assert forecast.ttft_s(500) == pytest.approx(0.5)
    for _ in range(200):
        forecast.note_step(100, 1.0)
    assert forecast.tokens_per_s == pytest.approx(100, rel=0.01)


def test_what_the_queue_does_not_explain_is_added() -> None:
    forecast = Forecast()
    forecast.note_step(1000, 1.0)
    for _ in range(50):
        forecast.note_first_token(1.3, 1.0)
    assert forecast.ttft_s(0) == pytest.approx(0.3, rel=0.01)
    for _ in range(50):
        forecast.note_first_token(0.5, 1.0)  # faster than foretold: never less than nothing
    assert forecast.ttft_s(0) == pytest.approx(0, abs=0.01)
