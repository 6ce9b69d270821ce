"""Fairness of runs that are small enough to check by hand."""

import pytest

from tests.loadtest.builders import record
from tiercel.loadtest.results.fairness import contended, fairness, jain_index
from tiercel.loadtest.results.service_tokens import both, busy, largest_gap_s, service_pieces
from tiercel.loadtest.results.timeline import (
    peak_output_tokens_per_s,
    peak_running,
    service_by_step,
    step_for,
    timeline,
)


def test_jain_is_one_when_all_is_equal_and_one_nth_when_one_has_it_all() -> None:
    assert jain_index([3, 3, 3]) == pytest.approx(1)
    assert jain_index([5, 0, 0, 0]) == pytest.approx(0.25)
    assert jain_index([1, 3]) == pytest.approx(16 / 20)
    assert jain_index([0, 0]) == 1


def test_service_is_the_uncached_prompt_and_the_answer() -> None:
    pieces = list(service_pieces(record(0, (1.0, 2.0), output_tokens=6, input_tokens=10, cached_tokens=4)))
    assert pieces == [(1.0, 6.0), (1.0, 3.0), (2.0, 3.0)]


def test_busy_time_goes_from_due_to_end() -> None:
    records = [record(1, (2, 3), due_s=0.5), record(2.5, (4,)), record(6, (7,))]
    assert busy(records) == [(0.5, 4), (6, 7)]
    assert both([(0, 2), (3, 5)], [(1, 4)]) == [(1, 2), (3, 4)]


def test_the_largest_gap_counts_waiting_but_not_idleness() -> None:
    assert largest_gap_s([record(1, (3.5, 4.0), due_s=0), record(50, (50.5,))]) == pytest.approx(3.5)


def test_tenants_are_compared_over_the_time_in_which_all_had_work() -> None:
    records = {
        "a": [record(0, (1.0, 2.0, 3.0, 4.0), tenant="a", input_tokens=0)],
        "b": [record(2.0, (3.5,), tenant="b", input_tokens=0, end_s=4.0)],
    }
    assert contended(records) == [(2.0, 4.0)]
    found = fairness(records, {"a": 1.0, "b": 1.0})
    assert found.contended_s == pytest.approx(2)
    assert found.jain_index == pytest.approx(jain_index([3, 1]))
    assert found.jain_index_whole_run == pytest.approx(jain_index([4, 1]))
    assert found.largest_gap_tenant == "b"
    assert found.largest_gap_s == pytest.approx(1.5)


def test_weights_divide_the_service() -> None:
    records = {
        "a": [record(0, (1.0, 2.0, 3.0), tenant="a", input_tokens=0)],
        "b": [record(0, (3.0,), tenant="b", input_tokens=0)],
    }
    found = fairness(records, {"a": 3.0, "b": 1.0})
    assert found.jain_index == pytest.approx(1)
    assert found.largest_difference_tokens == pytest.approx(1.0)


def test_without_time_in_common_the_whole_run_is_compared() -> None:
    records = {"a": [record(0, (1.0,), tenant="a")], "b": [record(2, (3.0,), tenant="b")]}
    found = fairness(records, {"a": 1.0, "b": 1.0})
    assert found.contended_s == 0
    assert found.jain_index == pytest.approx(1)


def test_a_timeline_counts_tokens_and_levels_step_by_step() -> None:
    records = [record(0.5, (1.1, 1.2, 2.1), due_s=0.0), record(1.5, (), error="broke", end_s=2.5)]
    line = timeline(records, 3.0, 1.0)
    assert line.output_tokens == [0, 2, 1]
    assert line.finished == [0, 0, 1]
    assert line.failed == [0, 0, 1]
    assert line.running == [0, 1, 2]
    assert line.queued == [1, 0, 0]
    assert service_by_step(records, 3.0, 1.0) == [0, 12, 1]
    assert peak_output_tokens_per_s(records, 3.0) == 2
    assert peak_running(records) == 2


def test_the_peak_of_a_run_under_a_second_is_its_mean() -> None:
    assert peak_output_tokens_per_s([record(0.0, (0.1, 0.2, 0.25), end_s=0.25)], 0.25) == 12


@pytest.mark.parametrize(
    ("duration_s", "step_s"), [(0.5, 0.1), (3, 0.1), (12, 0.5), (20, 1), (3600, 1), (7200, 2), (1e6, 60)]
)
def test_steps_are_a_second_unless_the_run_is_very_short_or_long(duration_s: float, step_s: float) -> None:
    assert step_for(duration_s) == step_s
