"""Priority bands of tenants."""

import pytest

from tiercel.values.ids import TenantId
from tiercel.values.tenant import LAST_BAND, TenantShare


@pytest.mark.parametrize(
    ("ceiling", "priority", "band"),
    [(0, None, 0), (3, None, 3), (3, 0, 3), (3, -5, 3), (3, 7, 7), (0, 10**9, LAST_BAND), (LAST_BAND, -1, LAST_BAND)],
)
def test_a_request_never_goes_before_the_first_band_of_its_tenant(
    ceiling: int, priority: int | None, band: int
) -> None:
    assert TenantShare(name=TenantId("a"), band=ceiling).band_of(priority) == band
