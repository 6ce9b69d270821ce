"""A victim that is preempted again while its first slice is in flight has not returned, and the slice is lost."""

from tests.scheduler.planner_bench import PlannerBench, victims
from tiercel.scheduler.policy import open_policy
from tiercel.values.ids import SeqId
from tiercel.values.outcome import FinishReason
from tiercel.values.plan import Plan, Preemption, SwapCost


def test_a_victim_with_a_discarded_slice_has_not_resumed() -> None:
    bench = PlannerBench(seqs=1, policy=open_policy("priority"))
    bench.submit(1, 15, band=1)
    bench.step()
    bench.book.settle(1.0, 0.0)
    bench.submit(2, 3, band=0)
    assert victims(bench.launch()) == (1,)  # with 15 computed tokens: the preemption that is followed
    bench.book.finish(SeqId(2), FinishReason.ABORT, 0.0)
    bench.cache.release(SeqId(2))
    back = bench.launch()  # all its lost tokens are in flight
    assert back.nano_batches
    bench.submit(3, 3, band=0)
    again = Preemption(SeqId(1), SeqId(3), "growth", is_swap=False, kept_tokens=0, cost=SwapCost(1.0, 1.0))
    bench.book.launch(Plan((), preemptions=(again,)), 0.0)  # before the step has committed
    bench.book.settle(1.0, 0.0)
    bench.commit(back)
    assert bench.book[SeqId(1)].computed == 0
    assert not list(bench.book.preemption_book.take_returned()), "the slice was discarded"
