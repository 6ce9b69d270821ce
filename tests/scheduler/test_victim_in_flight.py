"""Of two equal victims, the one is preempted whose work, in flight or committed, is cheaper to repeat."""

from tests.scheduler.planner_bench import BLOCK, PlannerBench, victims
from tiercel.scheduler.planner import Planner
from tiercel.scheduler.policy import open_policy
from tiercel.scheduler.swap_choice import SwapChooser
from tiercel.values.ids import SeqId
from tiercel.values.rates import Rates


def test_work_in_flight_counts_when_the_cheaper_victim_is_chosen() -> None:
    bench = PlannerBench(seqs=2, tokens=64, policy=open_policy("priority"))
    rates = Rates(prefill_token_s=1e-3, block_size=BLOCK)
    bench.planner = Planner(bench.book, bench.planner.limits, SwapChooser("recompute", lambda: rates))
    bench.submit(1, 20, band=1)
    bench.step()  # 20 tokens are computed
    bench.submit(2, 100, band=1)
    bench.launch()  # at least 60 tokens of the second are in flight
    assert bench.book[SeqId(2)].scheduled >= 60 > bench.book[SeqId(2)].computed == 0
    bench.submit(3, 3, band=0)
    assert victims(bench.launch()) == (1,)
