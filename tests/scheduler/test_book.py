"""The book of sequences: changes of tenants, places in the queue, preemptions."""

from tests.scheduler.planner_bench import BLOCK, CountingCache, PlannerBench, victims
from tiercel.scheduler.account import Account
from tiercel.scheduler.planner import Planner
from tiercel.scheduler.policy import open_policy
from tiercel.scheduler.swap_choice import SwapChooser
from tiercel.settings.settings import PreemptionMode
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.outcome import FinishReason
from tiercel.values.rates import Rates
from tiercel.values.tenant import Slo, Tenants, TenantShare

A, B = TenantId("a"), TenantId("b")


def tenants(band: int, ttft_s: float | None = None, tbt_s: float | None = None) -> Tenants:
    return Tenants(
        1, (TenantShare(name=A, band=band, slo=Slo(ttft_s=ttft_s, tbt_s=tbt_s)), TenantShare(name=B, band=1))
    )


def set_tenants(bench: PlannerBench, tenants: Tenants) -> None:
    for _ in bench.book.changing_tenants(tenants, 0.0):
        pass


# ---- changes of tenants


def test_new_bands_and_goals_apply_to_waiting_and_running_sequences() -> None:
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


def test_a_sequence_in_a_lower_band_stays_there_unless_the_first_band_is_below_it() -> None:
    bench = PlannerBench(policy=open_policy("priority"))
    set_tenants(bench, tenants(1))
    bench.submit(1, 3, band=4, tenant=A)
    for first, band in ((0, 4), (6, 6), (2, 2)):
        set_tenants(bench, tenants(first))
        assert bench.book[SeqId(1)].band == band
    set_tenants(bench, Tenants(2, ()))
    assert bench.book[SeqId(1)].band == 2, "a sequence of a removed tenant goes on as it is"


# ---- places in the queue


def test_a_running_prompt_is_queued_by_its_remaining_work() -> None:
    bench = PlannerBench(tokens=16, policy=open_policy("fair"))
    bench.submit(1, 160)
    queue, costs = bench.book.policy.queue, bench.book.policy.costs
    for done in range(16, 160, 16):
        bench.step()
        assert queue[SeqId(1)].work_s == costs.recompute_ms(160 - done, done) / 1e3


class LowerTier(CountingCache):
    """A cache in which every full block has a copy in DDR."""

    def blocks_below(self, seq: SeqId) -> tuple[int, int, int]:
        return 0, self.num_blocks(seq) - 1, 0


def preempted(mode: PreemptionMode) -> PlannerBench:
    """Return a bench whose sequence 1 was preempted for a higher band, with 14 computed tokens."""
    bench = PlannerBench(seqs=1, policy=open_policy("fair"))
    bench.cache = LowerTier(100)
    bench.planner = Planner(bench.book, bench.planner.limits, SwapChooser(mode, Rates))
    bench.submit(1, 13, band=1)
    bench.step()
    bench.step()
    bench.submit(2, 13, band=0)
    assert victims(bench.step()) == (1,)
    return bench


def test_a_victim_is_queued_by_the_tokens_that_it_must_compute_again() -> None:
    costs = open_policy("fair").costs
    swapped, dropped = preempted("swap"), preempted("recompute")
    assert swapped.book.policy.queue[SeqId(1)].work_s == costs.recompute_ms(15 - 3 * BLOCK, 3 * BLOCK) / 1e3
    assert dropped.book.policy.queue[SeqId(1)].work_s == costs.recompute_ms(15, 0) / 1e3


def test_kept_tokens_count_until_the_next_launch() -> None:
    bench = preempted("swap")
    bench.book.finish(SeqId(2), FinishReason.ABORT, 0.0)
    bench.cache.release(SeqId(2))
    bench.step()
    assert bench.book[SeqId(1)].cached_tokens == 0


def test_only_steps_of_prompts_correct_the_cost_of_prompts() -> None:
    bench = PlannerBench(seqs=8, tokens=128, blocks=200, policy=open_policy("fcfs"))
    costs = bench.book.policy.costs
    bench.submit(1, 128)
    bench.step()
    bench.book.settle(1e-3 * 2 * costs.prompt_ms(128, 0), 0.0)
    corrected = costs.prompt_scale
    assert corrected > 1
    for _ in range(3):  # slow decodes, then a prompt beside them
        bench.step()
        bench.book.settle(1.0, 0.0)
    bench.submit(2, 100)
    bench.step()
    bench.book.settle(1.0, 0.0)
    assert costs.prompt_scale == corrected


# ---- charges


def test_a_preemption_for_growth_is_paid_by_the_growing_sequence() -> None:
    bench = PlannerBench(blocks=6, tokens=64, policy=open_policy("fair"))
    bench.submit(1, 7, tenant=A)
    bench.submit(2, 6, tenant=B)
    plan = bench.step()
    while not victims(plan):
        plan = bench.step()
    assert victims(plan) == (2,)
    assert [(one.reason, one.beneficiary) for one in plan.preemptions] == [("growth", 1)]
    assert bench.book[SeqId(2)].preempted_for == Account(0, A)
