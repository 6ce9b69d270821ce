"""The conditions under which the client is saturated."""

import pytest

from tiercel.loadtest.client.assignment import Load
from tiercel.loadtest.client.client_load import client_load


def _load(*, shares: list[float] | None = None, lags_ms: list[float] | None = None, late: int = 0) -> Load:
    return Load(
        cpu_s=1.0,
        cpu_shares=shares or [0.3] * 10,
        lags_ms=lags_ms or [0.5] * 100,
        chunks=1000,
        chunks_by_second=[100] * 10,
        late_sends=late,
        uncounted=0,
    )


def test_a_client_with_room_to_spare_is_not_saturated() -> None:
    load = client_load([_load(), _load(shares=[0.5] * 10)], 100, 10.0, 2)
    assert not load.saturated
    assert load.reason == ""
    assert (load.processes, load.cpu_s, load.busiest_share) == (2, 2.0, 0.5)
    assert (load.chunks, load.chunks_per_s, load.peak_chunks_per_s) == (2000, 200.0, 200.0)


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (_load(shares=[0.3] * 8 + [0.99] * 2), "used 99% of a core"),
        (_load(lags_ms=[0.5] * 95 + [80.0] * 5), "ran 80 ms late"),
        (_load(late=5), "5 requests were sent more than 50 ms late"),
    ],
)
def test_a_busy_or_late_client_is_reported_with_its_reason(load: Load, words: str) -> None:
    found = client_load([_load(), load], 100, 10.0, 2)
    assert found.saturated
    assert words in found.reason


def test_a_single_busy_second_is_not_saturation() -> None:
    assert not client_load([_load(shares=[0.3] * 19 + [1.0])], 100, 20.0, 2).saturated
