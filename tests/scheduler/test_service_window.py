"""Service per weight over a window."""

import pytest

from tiercel.scheduler.service_window import ServiceWindow, by_band, gap_ms, jain
from tiercel.values.ids import TenantId

A, B, C = TenantId("a"), TenantId("b"), TenantId("c")


def _shares(window: ServiceWindow, **weights: float) -> dict[str, float]:
    return {str(name): ms for name, ms in window.per_weight_ms(lambda tenant: weights.get(tenant, 1.0)).items()}


def test_jain_and_gap_measure_service_per_weight() -> None:
    window = ServiceWindow()
    for step in range(13):
        window.observe({A: 10.0 * step, B: 30.0 * step, C: 99.0 * step}, (A, B), 5.0 * step)
    fair, unfair = _shares(window, a=1.0, b=3.0).values(), _shares(window).values()
    assert (jain(fair), gap_ms(fair)) == (pytest.approx(1.0), pytest.approx(0.0))
    assert (jain(unfair), gap_ms(unfair)) == (pytest.approx(160 / 200), pytest.approx(240.0))


def test_a_tenant_that_waits_alone_does_not_compete() -> None:
    window = ServiceWindow()
    for step in range(3):
        window.observe({A: 10.0 * step}, (A,), 5.0 * step)
    assert _shares(window) == {}


def test_the_window_begins_when_the_second_tenant_begins_to_wait() -> None:
    window = ServiceWindow()
    window.observe({}, (), 0.0)
    window.observe({A: 100.0}, (A,), 5.0)
    window.observe({A: 110.0}, (A, B), 10.0)
    assert _shares(window) == {}
    window.observe({A: 120.0, B: 30.0}, (A, B), 15.0)
    assert _shares(window) == {"a": 10.0, "b": 30.0}


def test_a_third_tenant_counts_when_it_has_waited_for_the_whole_window() -> None:
    window = ServiceWindow()
    for step in range(14):
        waiting = (A, B) if step < 3 else (A, B, C)
        window.observe({A: 10.0 * step, B: 30.0 * step, C: 20.0 * step}, waiting, 5.0 * step)
    assert _shares(window) == {"a": 120.0, "b": 360.0}
    for step in range(14, 16):
        window.observe({A: 10.0 * step, B: 30.0 * step, C: 20.0 * step}, (A, B, C), 5.0 * step)
    assert _shares(window) == {"a": 120.0, "b": 360.0, "c": 240.0}


def test_a_tenant_that_did_not_wait_between_two_samples_does_not_compete() -> None:
    window = ServiceWindow()
    window.observe({A: 0.0, B: 0.0}, (A, B), 0.0)
    window.observe({}, (), 2.0)
    window.observe({A: 5.0, B: 5.0}, (A, B), 500.0)
    assert _shares(window) == {}


def test_the_competition_ends_when_one_of_two_tenants_does_not_wait() -> None:
    window = ServiceWindow()
    for step in range(3):
        window.observe({A: 10.0 * step, B: 30.0 * step}, (A, B), 5.0 * step)
    assert _shares(window) == {"a": 20.0, "b": 60.0}
    window.observe({A: 20.0, B: 60.0}, (B,), 11.0)
    assert _shares(window) == {}


def test_tenants_compete_only_inside_a_band() -> None:
    shares = {A: 1.0, B: 2.0, C: 9.0}
    assert by_band(shares, {A: 1, B: 1, C: 0}) == [[1.0, 2.0]]
    assert by_band(shares, {A: 1, B: 2, C: 3}) == []
    assert by_band(shares, {}) == [[1.0, 2.0, 9.0]]


def test_no_service_at_all_is_even() -> None:
    assert jain([0.0, 0.0]) == 1.0
    assert gap_ms([0.0, 0.0]) == 0.0
