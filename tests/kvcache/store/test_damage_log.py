"""Many damaged blocks are one line of the log, not a counter alone."""

import pytest

from tiercel.kvcache.store.damage_log import DamageLog
from tiercel.values.clock import ManualClock
from tiercel.values.ids import BlockKey, SlotId
from tiercel.values.tier import Purpose, Route, Transfer


def miss(number: int, route: Route = Route.PREFETCH) -> Transfer:
    key = BlockKey(number.to_bytes(32, "big"))
    return Transfer(number, route, Purpose.PREFETCH, (key,), (SlotId(number),), (SlotId(1),))


def test_hundreds_of_damaged_blocks_are_one_line_with_their_number_and_the_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    damage = DamageLog(clock)
    for number in range(7, 307):
        damage.note(miss(number))
        damage.tell_due()
    assert not caplog.records
    damage.note(miss(9, Route.VERIFY))
    clock.advance(1.0)
    damage.tell_due()
    damage.tell_due()
    assert [record.getMessage() for record in caplog.records] == [
        "kv blocks damaged route=ssd_ddr count=300 first_slot=7 first_key=0000000000000000",
        "kv blocks damaged route=ddr_ddr count=1 first_slot=9 first_key=0000000000000000",
    ]


def test_damage_that_goes_on_is_told_once_a_minute_and_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    damage = DamageLog(clock)
    for _ in range(180):
        damage.note(miss(1))
        clock.advance(1.0)
        damage.tell_due()
    assert len(caplog.records) == 3
    damage.note(miss(2))
    damage.tell()
    damage.tell()
    assert "first_slot=1" in caplog.text and len(caplog.records) == 4
