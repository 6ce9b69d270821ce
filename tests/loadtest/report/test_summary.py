"""The report as text."""

import msgspec
import pytest

from tests.loadtest.example_run import example_run
from tiercel.loadtest.report.summary import summary
from tiercel.loadtest.results.record import Counter, RunResult


def _timed(run: RunResult, *are_timed: bool) -> RunResult:
    tenants = [
        msgspec.structs.replace(tenant, is_timed=is_timed)
        for tenant, is_timed in zip(run.tenants, are_timed, strict=True)
    ]
    return msgspec.structs.replace(run, tenants=tenants, arrivals="closed loop of 4; poisson, 2/s")


@pytest.mark.parametrize(("are_timed", "is_shown"), [((False, True, False), True), ((False, False, False), False)])
def test_latency_from_the_due_time_is_reported_for_tenants_with_due_times(
    are_timed: tuple[bool, ...], is_shown: bool
) -> None:
    text = summary(_timed(example_run(), *are_timed), "ttft,tpot,itl,e2el", [99.0])
    assert ("P99 TTFT due (ms):" in text) == is_shown
    assert ("P99 E2EL due (ms):" in text) == is_shown


def test_counters_that_moved_are_listed_and_preemptions_always() -> None:
    counters = {
        "vllm:num_preemptions_total": Counter(3, 3),
        'tiercel_preemptions_total{mode="swap",reason="capacity"}': Counter(1, 6),
        'tiercel_preemptions_total{mode="recompute",reason="capacity"}': Counter(2, 2),
        'tiercel_kv_transfer_seconds_total{route="hbm_ddr"}': Counter(0.25, 0.75),
        "somebody_elses_total": Counter(0, 9),
    }
    text = summary(msgspec.structs.replace(example_run(), counters=counters), "ttft", [99.0])
    listed = [line.split() for line in text.splitlines() if "_total" in line]
    assert listed == [
        ["0", "vllm:num_preemptions_total"],
        ["5", 'tiercel_preemptions_total{mode="swap",reason="capacity"}'],
        ["0.5", 'tiercel_kv_transfer_seconds_total{route="hbm_ddr"}'],
    ]
