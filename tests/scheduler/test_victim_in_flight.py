"""Of two equal victims the one goes whose work, in flight or committed, is cheaper to repeat."""

from tests.scheduler.counting import BLOCK, Room
from tiercel.rates import Rates
from tiercel.scheduler.planner import Planner
from tiercel.scheduler.policy import open_policy
from tiercel.scheduler.swap_choice import SwapChooser


def test_work_in_flight_counts_when_the_cheaper_victim_is_chosen() -> None:
    room = Room(seqs=2, tokens=64, policy=open_policy("priority"))
    rates = Rates(prefill_token_s=1e-3, block_size=BLOCK)
    room.planner = Planner(room.book, room.planner.limits, SwapChooser("recompute", lambda: rates))
    room.submit(1, 20, band=1)
    room.step()  # 20 tokens are computed
    room.submit(2, 100, band=1)
    room.launch()  # 60 and more of the second are in flight
    assert room.book[2].scheduled >= 60 > room.book[2].computed == 0
    room.submit(3, 3, band=0)
    assert room.launch().victims == (1,)
