"""What is told of single sequences."""

from tests.scheduler.test_planner import Room
from tiercel.ids import SeqId
from tiercel.outcome import SequenceGauges, SequenceState


def test_those_that_run_are_told_and_those_that_gave_way_but_none_that_only_wait() -> None:
    room = Room(blocks=6, tokens=64)
    room.submit(1, 9)
    room.submit(2, 4)
    room.submit(3, 60)
    room.step()
    assert room.book.gauges(9) == (
        SequenceGauges(SeqId(1), SequenceState.RUNNING, 9, 0),
        SequenceGauges(SeqId(2), SequenceState.RUNNING, 4, 0),
    )
    while not room.step().victims:
        pass
    told = {one.seq: one for one in room.book.gauges(9)}
    assert told[SeqId(2)] == SequenceGauges(SeqId(2), SequenceState.PREEMPTED, 0, 1)
    assert set(told) == {1, 2}
    assert [one.seq for one in room.book.gauges(1)] == [1]
