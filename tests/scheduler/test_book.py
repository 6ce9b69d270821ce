"""What the book makes of what happens to those it holds: other tenants, slices, preemptions."""

from tests.scheduler.planner_bench import BLOCK, CountingCache, PlannerBench, victims
from tiercel.ids import SeqId, TenantId
from tiercel.outcome import FinishReason
from tiercel.rates import Rates
from tiercel.scheduler.account import Account
from tiercel.scheduler.planner import Planner
from tiercel.scheduler.policy import open_policy
from tiercel.scheduler.swap_choice import SwapChooser
from tiercel.settings import PreemptionMode
from tiercel.tenant import Slo, Tenants, TenantShare

A, B = TenantId("a"), TenantId("b")


def tenants(band: int, ttft_s: float | None = None, tbt_s: float | None = None) -> Tenants:
    return Tenants(
        1, (TenantShare(name=A, band=band, slo=Slo(ttft_s=ttft_s, tbt_s=tbt_s)), TenantShare(name=B, band=1))
    )


def set_tenants(bench: PlannerBench, tenants: Tenants) -> None:
    for _ in bench.book.changing_tenants(tenants, 0.0):
        pass


# tenants that change


def test_new_bands_and_goals_hold_for_those_that_wait_and_run() -> None:
    bench = PlannerBench(seqs=2, policy=open_policy("fair"))
    set_tenants(bench, tenants(1))
    for seq, tenant in ((1, A), (2, B), (3, A), (4, B)):
        bench.submit(seq, 3, band=1, tenant=tenant)
    bench.step()
    set_tenants(bench, tenants(0, ttft_s=0.5, tbt_s=0.02))
    bench.book.check_integrity()
    book, queue = bench.book, bench.book.policy.queue
    assert [book[SeqId(seq)].band for seq in (1, 2, 3, 4)] == [0, 1, 0, 1]
    assert queue[SeqId(3)].ttft_goal_s == 0.5
    assert queue[SeqId(3)].since_s == 3.0, "its waiting time is kept"
    assert book[SeqId(1)].tbt_goal_s == 0.02
    assert victims(bench.launch()) == (2,), "the row goes to the higher band"


def test_who_asked_for_a_later_band_stays_there_unless_the_first_one_is_behind_it() -> None:
    bench = PlannerBench(policy=open_policy("priority"))
    set_tenants(bench, tenants(1))
    bench.submit(1, 3, band=4, tenant=A)
    for first, band in ((0, 4), (6, 6), (2, 2)):
        set_tenants(bench, tenants(first))
        assert bench.book[SeqId(1)].band == band
    set_tenants(bench, Tenants(2, ()))
    assert bench.book[SeqId(1)].band == 2, "its tenant has left: it goes on as it is"


# what is left to do


def test_a_prompt_under_way_is_placed_by_what_is_left_of_it() -> None:
    bench = PlannerBench(tokens=16, policy=open_policy("fair"))
    bench.submit(1, 160)
    queue, costs = bench.book.policy.queue, bench.book.policy.costs
    for done in range(16, 160, 16):
        bench.step()
        assert queue[SeqId(1)].work_s == costs.recompute_ms(160 - done, done) / 1e3


class LowerTier(CountingCache):
    """Every full block has a copy below."""

    def blocks_below(self, seq: SeqId) -> tuple[int, int, int]:
        return 0, self.num_blocks(seq) - 1, 0


def preempted(mode: PreemptionMode) -> PlannerBench:
    """Sequence 1 has given way for a higher band with 14 tokens computed."""
    bench = PlannerBench(seqs=1, policy=open_policy("fair"))
    bench.cache = LowerTier(100)
    bench.planner = Planner(bench.book, bench.planner.limits, SwapChooser(mode, Rates))
    bench.submit(1, 13, band=1)
    bench.step()
    bench.step()
    bench.submit(2, 13, band=0)
    assert victims(bench.step()) == (1,)
    return bench


def test_a_victim_is_placed_by_what_it_must_compute_again() -> None:
    costs = open_policy("fair").costs
    swapped, dropped = preempted("swap"), preempted("recompute")
    assert swapped.book.policy.queue[SeqId(1)].work_s == costs.recompute_ms(15 - 3 * BLOCK, 3 * BLOCK) / 1e3
    assert dropped.book.policy.queue[SeqId(1)].work_s == costs.recompute_ms(15, 0) / 1e3


def test_what_was_kept_counts_until_it_is_launched_again() -> None:
    bench = preempted("swap")
    bench.book.finish(SeqId(2), FinishReason.ABORT, 0.0)
    bench.cache.release(SeqId(2))
    bench.step()
    assert bench.book[SeqId(1)].cached_tokens == 0


def test_steps_of_prompts_alone_tell_what_prompts_cost() -> None:
    bench = PlannerBench(seqs=8, tokens=128, blocks=200, policy=open_policy("fcfs"))
    costs = bench.book.policy.costs
    bench.submit(1, 128)
    bench.step()
    bench.book.settle(1e-3 * 2 * costs.prompt_ms(128, 0), 0.0)
    corrected = costs.prompt_scale
    assert corrected > 1
    for _ in range(3):  # decodes, slow ones, and then a prompt beside them
        bench.step()
        bench.book.settle(1.0, 0.0)
    bench.submit(2, 100)
    bench.step()
    bench.book.settle(1.0, 0.0)
    assert costs.prompt_scale == corrected


# who pays


def test_what_growth_throws_away_is_paid_by_who_grew() -> None:
    bench = PlannerBench(blocks=6, tokens=64, policy=open_policy("fair"))
    bench.submit(1, 7, tenant=A)
    bench.submit(2, 6, tenant=B)
    plan = bench.step()
    while not victims(plan):
        plan = bench.step()
    assert victims(plan) == (2,)
    assert [(one.reason, one.beneficiary) for one in plan.preemptions] == [("growth", 1)]
    assert bench.book[SeqId(2)].preempted_for == Account(0, A)
