"""A victim that gives way again while its first slice is in flight is not back, and what was in flight is lost."""

from tests.scheduler.counting import Room
from tiercel.ids import SeqId
from tiercel.outcome import FinishReason
from tiercel.plan import Plan, SwapCost
from tiercel.scheduler.policy import open_policy


def test_a_victim_whose_slice_is_discarded_has_not_returned() -> None:
    room = Room(seqs=1, policy=open_policy("priority"))
    room.submit(1, 15, band=1)
    room.step()
    room.book.settle(1.0, 0.0)
    room.submit(2, 3, band=0)
    assert room.launch().victims == (1,)  # with 15 tokens computed: the switch that is followed
    room.book.finish(SeqId(2), FinishReason.ABORT, 0.0)
    room.cache.release(SeqId(2))
    back = room.launch()  # all that it lost is in flight
    assert back.nano_batches
    room.submit(3, 3, band=0)
    grows = Plan(
        nano_batches=(), admitted=(), victims=(SeqId(1),), reasons=("growth",), beneficiaries=(SeqId(3),), kept=(0,),
        prices_ms=(0.0,), costs=(SwapCost(1.0, 1.0),),
    )  # fmt: skip
    room.book.launch(grows, 0.0)  # it gives way again before the step has committed
    room.book.settle(1.0, 0.0)
    room.commit(back)
    assert room.book[SeqId(1)].computed == 0
    assert not list(room.book.preemption_book.take_returned()), "nothing of it is back"
