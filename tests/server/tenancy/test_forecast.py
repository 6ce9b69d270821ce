"""The forecast of the time to first token."""

import pytest

from tiercel.server.tenancy.forecast import DrainRate, ForecastError, PromptThroughput


def test_nothing_is_foretold_before_anything_is_known() -> None:
    throughput = PromptThroughput()
    throughput.note_step(0, 10.0)
    assert throughput.queue_s(1000) is None
    error = ForecastError()
    error.note(1.0, None, 0.0)
    assert error.at_s(0.0) == 0


def test_the_speed_follows_the_work_under_load() -> None:
    throughput = PromptThroughput()
    for _ in range(100):
        throughput.note_step(100, 0.1)
    assert throughput.queue_s(1000) == pytest.approx(1)
    assert throughput.queue_s(500) == pytest.approx(0.5)
    for _ in range(200):
        throughput.note_step(100, 1.0)
    assert throughput.queue_s(100) == pytest.approx(1, rel=0.01)


def test_the_time_not_explained_by_the_queue_is_added() -> None:
    error = ForecastError()
    for _ in range(50):
        error.note(1.3, 1.0, 0.0)
    assert error.at_s(0.0) == pytest.approx(0.3, rel=0.01)
    for _ in range(50):
        error.note(0.5, 1.0, 0.0)  # faster than foretold: never less than nothing
    assert error.at_s(0.0) == 0


def test_errors_to_both_sides_cancel() -> None:
    error = ForecastError()
    for number in range(200):
        error.note(3.0 if number % 2 else 1.0, 2.0, 0.0)
    assert error.at_s(0.0) < 0.2


def test_a_tenant_that_is_refused_is_not_refused_for_ever() -> None:
    error = ForecastError()
    error.note(9.0, 1.0, 100.0)
    assert error.at_s(100.0) == 8.0
    assert error.at_s(105.0) == 4.0
    assert error.at_s(160.0) < 0.01
    assert error.at_s(99.0) == 8.0


def test_a_goal_leaves_room_for_how_far_first_tokens_scatter() -> None:
    error = ForecastError()
    assert error.spread_s(0.0) == 0
    for _ in range(200):
        error.note(1.2, 1.0, 0.0)
    assert error.spread_s(0.0) == pytest.approx(0.0, abs=0.01)
    for number in range(200):
        error.note(1.1 if number % 2 else 0.9, 1.0, 0.0)
    assert 0.2 < error.spread_s(0.0) < 0.4
    assert error.spread_s(5.0) == pytest.approx(error.spread_s(0.0) / 2)


def test_the_drain_of_a_tenant_counts_the_time_in_which_it_waits() -> None:
    drain = DrainRate()
    assert drain.tokens_per_s is None
    drain.begin(0.0)
    drain.note(100, 0.4)
    assert drain.tokens_per_s is None  # too short a time says nothing
    drain.note(150, 0.5)
    assert drain.tokens_per_s == pytest.approx(500)
    drain.pause(0.5)
    drain.begin(100.0)  # nothing waited in between
    drain.note(250, 100.5)
    assert drain.tokens_per_s == pytest.approx(500)
    assert drain.freshness(100.5) == 1.0
    assert drain.freshness(105.5) == pytest.approx(0.5)
