"""Time series made from readings of /metrics."""

import pytest

from tests.loadtest.example_run import example_run
from tiercel.loadtest.metrics.server_series import (
    hit_rate,
    preemption_rates,
    service_shares,
    tier_shares,
    transfer_rates,
    transfer_speeds,
)
from tiercel.loadtest.results.record import Sample


def test_tiers_are_shares_from_the_fastest_down_and_counters_become_rates() -> None:
    run = example_run()
    assert [reading.name for reading in tier_shares(run.samples)] == ["HBM", "DDR", "SSD"]
    assert all(0 <= (value or 0) <= 1 for reading in tier_shares(run.samples) for value in reading.values)
    (only,) = [reading for reading in transfer_rates(_counting(0, 10, 30, 5, 15)) if reading.name == "DDR to SSD"]
    assert only.values == (10, 20, None, 10, 10)


def test_the_speed_of_a_route_counts_the_time_in_which_it_moved_bytes() -> None:
    assert transfer_speeds(example_run().counters) == {"HBM to DDR": 2e9}


def test_service_shares_are_compared_with_fair_shares() -> None:
    shares = {share.got.name: share for share in service_shares(example_run().samples)}
    assert shares["interactive"].got.values[5] == pytest.approx(0.6)
    assert shares["interactive"].fair.values[5] == pytest.approx(0.6)
    assert shares["batch"].fair.values[5] == pytest.approx(0.2)


def test_preemptions_are_reported_by_mode_or_as_a_sum() -> None:
    assert [history.name for history in preemption_rates(example_run().samples)] == [
        "By recompute, 1/s", "By swap, 1/s",
    ]  # fmt: skip
    plain = [Sample(float(at_s), {"vllm:num_preemptions_total": 2.0 * at_s}) for at_s in range(3)]
    assert [history.values for history in preemption_rates(plain)] == [(2, 2, 2)]


def test_series_of_other_servers_are_understood() -> None:
    samples = [
        Sample(float(at_s), {"vllm:kv_cache_usage_perc": 0.5, "vllm:kv_offload_store_bytes_total": 100.0 * at_s})
        for at_s in range(3)
    ]
    assert [reading.name for reading in tier_shares(samples)] == ["HBM"]
    assert [(reading.name, reading.values[0]) for reading in transfer_rates(samples)] == [("HBM to DDR", 100.0)]
    assert hit_rate(samples) is None


def _counting(*values: float) -> list[Sample]:
    key = 'tiercel_kv_transfer_bytes_total{route="ddr_ssd"}'
    return [Sample(float(at_s), {key: value}) for at_s, value in enumerate(values)]
