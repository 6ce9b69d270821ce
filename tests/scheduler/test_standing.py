"""Service by weight over a window."""

import pytest

from scheduler.standing import ServiceWindow
from tiercel.ids import TenantId

A, B, C = TenantId("a"), TenantId("b"), TenantId("c")


def test_equal_service_by_weight_is_fair_and_a_starved_tenant_shows() -> None:
    window = ServiceWindow()
    for step in range(13):
        window.note({A: 10.0 * step, B: 30.0 * step, C: 99.0 * step}, (A, B), 5.0 * step)
    assert window.jain({A: 1.0, B: 3.0}) == pytest.approx(1.0)
    assert window.gap_ms({A: 1.0, B: 3.0}) == pytest.approx(0.0)
    assert window.jain({A: 1.0, B: 1.0}) == pytest.approx(160 / 200)
    assert window.gap_ms({A: 1.0, B: 1.0}) == pytest.approx(240.0)


def test_who_did_not_wait_all_the_while_does_not_count() -> None:
    window = ServiceWindow()
    window.note({A: 0.0, B: 0.0}, (A, B), 0.0)
    window.note({A: 50.0, B: 0.0}, (A,), 5.0)
    assert window.jain({}) == 1.0
    assert window.gap_ms({}) == 0.0


def test_samples_come_at_most_every_five_seconds() -> None:
    window = ServiceWindow()
    window.note({A: 0.0}, (A,), 0.0)
    window.note({A: 9.0}, (A,), 1.0)
    assert window.per_weight_ms({}) == {}
