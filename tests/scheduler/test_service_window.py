"""Service by weight over a window."""

import pytest

from tiercel.ids import TenantId
from tiercel.scheduler.service_window import ServiceWindow, by_band, gap_ms, jain

A, B, C = TenantId("a"), TenantId("b"), TenantId("c")


def _shares(window: ServiceWindow, **weights: float) -> dict[str, float]:
    return {str(name): ms for name, ms in window.per_weight_ms(lambda tenant: weights.get(tenant, 1.0)).items()}


def test_equal_service_by_weight_is_fair_and_a_starved_tenant_shows() -> None:
    window = ServiceWindow()
    for step in range(13):
        window.observe({A: 10.0 * step, B: 30.0 * step, C: 99.0 * step}, (A, B), 5.0 * step)
    fair, unfair = _shares(window, a=1.0, b=3.0).values(), _shares(window).values()
    assert (jain(fair), gap_ms(fair)) == (pytest.approx(1.0), pytest.approx(0.0))
    assert (jain(unfair), gap_ms(unfair)) == (pytest.approx(160 / 200), pytest.approx(240.0))


def test_who_waits_alone_competes_with_nobody() -> None:
    window = ServiceWindow()
    for step in range(3):
        window.observe({A: 10.0 * step}, (A,), 5.0 * step)
    assert _shares(window) == {}


def test_the_while_begins_when_the_second_one_came() -> None:
    window = ServiceWindow()
    window.observe({}, (), 0.0)
    window.observe({A: 100.0}, (A,), 5.0)
    window.observe({A: 110.0}, (A, B), 10.0)
    assert _shares(window) == {}
    window.observe({A: 120.0, B: 30.0}, (A, B), 15.0)
    assert _shares(window) == {"a": 10.0, "b": 30.0}


def test_a_third_one_counts_as_soon_as_two_have_not_waited_longer_without_it() -> None:
    window = ServiceWindow()
    for step in range(14):
        waiting = (A, B) if step < 3 else (A, B, C)
        window.observe({A: 10.0 * step, B: 30.0 * step, C: 20.0 * step}, waiting, 5.0 * step)
    assert _shares(window) == {"a": 120.0, "b": 360.0}
    for step in range(14, 16):
        window.observe({A: 10.0 * step, B: 30.0 * step, C: 20.0 * step}, (A, B, C), 5.0 * step)
    assert _shares(window) == {"a": 120.0, "b": 360.0, "c": 240.0}


def test_who_was_seen_not_to_wait_between_two_samples_did_not_wait_all_the_while() -> None:
    window = ServiceWindow()
    window.observe({A: 0.0, B: 0.0}, (A, B), 0.0)
    window.observe({}, (), 2.0)
    window.observe({A: 5.0, B: 5.0}, (A, B), 500.0)
    assert _shares(window) == {}


def test_nobody_competes_any_more_as_soon_as_one_does_not_wait() -> None:
    window = ServiceWindow()
    for step in range(3):
        window.observe({A: 10.0 * step, B: 30.0 * step}, (A, B), 5.0 * step)
    assert _shares(window) == {"a": 20.0, "b": 60.0}
    window.observe({A: 20.0, B: 60.0}, (B,), 11.0)
    assert _shares(window) == {}


def test_tenants_compete_inside_a_band_only() -> None:
    shares = {A: 1.0, B: 2.0, C: 9.0}
    assert by_band(shares, {A: 1, B: 1, C: 0}) == [[1.0, 2.0]]
    assert by_band(shares, {A: 1, B: 2, C: 3}) == []
    assert by_band(shares, {}) == [[1.0, 2.0, 9.0]]


def test_when_nobody_got_anything_all_got_the_same() -> None:
    assert jain([0.0, 0.0]) == 1.0
    assert gap_ms([0.0, 0.0]) == 0.0
