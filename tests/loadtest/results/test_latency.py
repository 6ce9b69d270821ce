"""Latencies and figures of requests with known times."""

import random

import numpy
import pytest

from tests.loadtest.builders import record
from tiercel.loadtest.results.distribution import figures, percentile, quantiles
from tiercel.loadtest.results.latency import is_good, latencies
from tiercel.loadtest.results.record import METRICS, Goals


def test_ttft_counts_from_the_send_and_ttft_due_from_the_due_time() -> None:
    values = latencies([record(1.0, (1.25, 1.5), due_s=0.5)])
    assert values["ttft"] == pytest.approx([250])
    assert values["ttft_due"] == pytest.approx([750])
    assert values["client_queue_time"] == pytest.approx([500])
    assert values["e2el"] == pytest.approx([500])
    assert values["e2el_due"] == pytest.approx([1000])


def test_tpot_divides_by_tokens_and_itl_counts_gaps_between_chunks() -> None:
    values = latencies([record(0.0, (0.5, 0.7, 1.0), output_tokens=11)])
    assert values["tpot"] == pytest.approx([50])
    assert values["itl"] == pytest.approx([200, 300])


def test_a_request_of_one_token_has_no_tpot() -> None:
    values = latencies([record(0.0, (0.5,), output_tokens=1)])
    assert values["tpot"] == []
    assert values["ttft"] == pytest.approx([500])


def test_failed_requests_are_in_no_latency() -> None:
    values = latencies([record(0.0, (0.5, 0.6), error="broke")])
    assert not any(values[metric] for metric in METRICS)


def test_percentiles_and_deviation_are_numpys() -> None:
    rng = random.Random(1)
    values = sorted(rng.expovariate(1.0) for _ in range(137))
    for rank in (0, 1, 25, 50, 90, 99, 99.9, 100):
        assert percentile(values, rank) == pytest.approx(float(numpy.percentile(values, rank)))
    found = figures({"ttft": values}, (99.9,))
    assert found["std_ttft_ms"] == pytest.approx(float(numpy.std(values)))
    assert found["p99.9_ttft_ms"] == pytest.approx(float(numpy.percentile(values, 99.9)))
    assert found["median_ttft_ms"] == pytest.approx(float(numpy.median(values)))


def test_figures_of_nothing_are_none() -> None:
    assert figures({"ttft": []}, (99,))["mean_ttft_ms"] is None
    assert quantiles({"ttft": []}) == {}


def test_quantiles_go_from_the_least_to_the_most() -> None:
    curve = quantiles({"ttft": [1.0, 2.0, 3.0]})["ttft"]
    assert len(curve) == 101
    assert (curve[0], curve[50], curve[100]) == (1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("goals", "good"),
    [
        (Goals(ttft=501, tpot=101, e2el=801), True),
        (Goals(ttft=499), False),
        (Goals(tpot=99), False),
        (Goals(e2el=799), False),
        (Goals(), True),
    ],
)
def test_a_good_request_keeps_all_its_goals(goals: Goals, good: bool) -> None:
    asked = record(0.0, (0.5, 0.6, 0.7, 0.8), output_tokens=4)
    assert is_good(asked, goals) is good


def test_a_request_of_one_token_keeps_any_tpot_goal_and_a_failed_one_keeps_none() -> None:
    assert is_good(record(0.0, (0.5,), output_tokens=1), Goals(tpot=1))
    assert not is_good(record(0.0, (0.5,), error="broke"), Goals())
