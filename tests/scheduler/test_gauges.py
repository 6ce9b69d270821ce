"""The gauges of single sequences."""

from tests.scheduler.planner_bench import PlannerBench, victims
from tiercel.values.ids import SeqId
from tiercel.values.outcome import SequenceGauges, SequenceState


def test_gauges_list_running_and_preempted_sequences_but_no_others() -> None:
    bench = PlannerBench(blocks=6, tokens=64)
    bench.submit(1, 9)
    bench.submit(2, 4)
    bench.submit(3, 60)
    bench.step()
    assert bench.book.gauges(9) == (
        SequenceGauges(SeqId(1), SequenceState.RUNNING, 9, 0),
        SequenceGauges(SeqId(2), SequenceState.RUNNING, 4, 0),
    )
    while not victims(bench.step()):
        pass
    gauges = {one.seq: one for one in bench.book.gauges(9)}
    assert gauges[SeqId(2)] == SequenceGauges(SeqId(2), SequenceState.PREEMPTED, 0, 1)
    assert set(gauges) == {1, 2}
    assert [one.seq for one in bench.book.gauges(1)] == [1]
