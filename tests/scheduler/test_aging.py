"""The aging share."""

import pytest

from tiercel.scheduler.aging import AgingShare


def test_aged_service_is_the_aging_share_of_all_service() -> None:
    aging = AgingShare(10.0)
    aged_ms = 0.0
    for _ in range(10_000):
        given = 7.0 if aging.is_due else 0.0
        aged_ms += given
        aging.add(10.0, given)
    assert aged_ms == pytest.approx(0.05 * 10_000 * 10.0, rel=0.01)


def test_unused_aging_is_not_saved_up() -> None:
    aging = AgingShare(10.0)
    for _ in range(10_000):
        aging.add(10.0, 0.0)
    aging.add(0.0, 10.0)
    assert not aging.is_due
    assert not aging.is_spent
    aging.add(0.0, 201.0)
    assert aging.is_spent
    aging.add(0.0, 1e6)
    for _ in range(401):
        aging.add(10.0, 0.0)
    assert aging.is_due, "service beyond the debt limit delays no other sequence"
