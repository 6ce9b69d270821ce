"""Pauses and preemptions for debt, quotas, bands and starving sequences."""

import pytest

from tests.scheduler.planner_bench import BLOCK, CountingCache, Hit, PlannerBench, slices, victims
from tiercel.scheduler.fairness import TenantBook
from tiercel.scheduler.policy import Policy, open_policy
from tiercel.scheduler.preemption_budget import WORTH
from tiercel.scheduler.step_limits import StepLimits
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.outcome import FinishReason
from tiercel.values.plan import Plan
from tiercel.values.tenant import KvQuota, PolicyName, Tenants, TenantShare

STEP_S = 0.05


def fair(*shares: TenantShare) -> Policy:
    """Return a fair policy with D = 4 ms and a patience of 0.1 s. A step takes at least 5 ms."""
    policy = open_policy("fair", step_ms=1.0, patience_s=0.1)
    policy.set_tenants(Tenants(1, shares), 0.0)
    return policy


def step(bench: PlannerBench) -> Plan:
    bench.now_s += STEP_S
    return bench.step()


def run(bench: PlannerBench, steps: int) -> list[Plan]:
    return [step(bench) for _ in range(steps)]


def seqs(plan: Plan) -> list[int]:
    return [seq for seq, _, _ in slices(plan)]


def count(bench: PlannerBench, seq: int) -> int:
    return bench.book[SeqId(seq)].num_outputs


# ---- debt


def debtor_beside_a_long_prompt(hits: dict[int, int | None] | None = None) -> PlannerBench:
    """Return a bench in which tenant a has decoded for long when b submits a prompt of many steps."""
    heavy = TenantShare(name=TenantId("b"), weight=10.0)
    bench = PlannerBench(blocks=400, tokens=8, policy=fair(heavy), hits=hits)
    bench.submit(1, 4, max_tokens=900, tenant="a")
    run(bench, 20)
    bench.submit(2, 400, arrival_s=bench.now_s, tenant="b")
    return bench


def test_a_debtor_pauses_with_its_blocks_while_the_creditor_can_be_served() -> None:
    bench = debtor_beside_a_long_prompt()
    plans = run(bench, 40)
    assert any(seqs(plan) == [2] for plan in plans), "the debtor never paused"
    assert bench.book.preemption_counts.total == 0
    assert bench.cache.num_blocks(SeqId(1)) * BLOCK >= bench.book[SeqId(1)].computed
    before = count(bench, 1)
    run(bench, 60)
    assert count(bench, 1) > before + 10, "the debtor goes on when the other tenant is owed no more"


def test_a_debtor_continues_while_the_creditor_is_deferred() -> None:
    bench = debtor_beside_a_long_prompt(hits={2: None})
    before = count(bench, 1)
    assert [seqs(plan) for plan in run(bench, 40)] == [[1]] * 40
    assert count(bench, 1) == before + 40


def test_a_debtor_is_preempted_if_the_creditor_needs_its_room() -> None:
    bench = PlannerBench(blocks=400, seqs=1, tokens=64, policy=fair())
    bench.submit(1, 4, max_tokens=900, tenant="a")
    run(bench, 20)
    bench.submit(2, 40, arrival_s=bench.now_s, tenant="b")
    served = bench.book.policy.fair.served_ms
    before_ms = served[TenantId("a")]
    plans: list[Plan] = []
    while not (plans and victims(plans[-1])) and len(plans) < 80:
        plans.append(step(bench))
    served_ms = served[TenantId("a")] - before_ms
    plans += run(bench, 20)
    taken = next(number for number, plan in enumerate(plans) if victims(plan))
    (preemption,) = plans[taken].preemptions
    assert (preemption.victim, preemption.reason) == (1, "debt")
    assert any(2 in plan.admitted for plan in plans[taken:])
    assert served_ms >= WORTH * preemption.price_ms, "it was preempted before its debt was worth the price"


def test_no_sequence_is_preempted_for_debt_if_that_does_not_free_enough_room() -> None:
    bench = PlannerBench(blocks=60, seqs=4, tokens=16, policy=fair(TenantShare(name=TenantId("c"), weight=9.0)))
    bench.submit(1, 40, max_tokens=150, tenant="a")
    bench.submit(3, 40, max_tokens=150, tenant="c")  # is never in debt, and holds blocks that tenant b needs
    run(bench, 20)
    bench.submit(2, 200, arrival_s=bench.now_s, tenant="b")
    plans = run(bench, 60)
    assert all(3 in seqs(plan) for plan in plans)
    assert not any(victims(plan) for plan in plans)


def test_the_sequence_with_the_aging_share_of_a_step_is_not_preempted_in_that_step() -> None:
    """A starving prompt of a lower band gets a slice while a request of a higher band finds no room."""
    bench = PlannerBench(blocks=12, seqs=4, tokens=8, policy=open_policy("fair", step_ms=2.0, patience_s=1.0))
    bench.submit(9, 5, max_tokens=12)
    run(bench, 16)  # the aging share becomes due
    bench.submit(1, 40, max_tokens=4, band=1, tenant="low")
    run(bench, 2)
    bench.now_s += 31.0
    bench.submit(2, 30, max_tokens=4, arrival_s=bench.now_s, tenant="high")
    plan = step(bench)
    assert plan.aged == 1
    assert 1 in seqs(plan)
    assert not victims(plan)


def test_a_paused_long_prompt_does_not_count_against_the_limit_on_long_prompts() -> None:
    bench = PlannerBench(blocks=400, tokens=8, policy=fair())
    bench.planner.set_limits(StepLimits(8, 8, max_long_partial_prefills=1, long_prompt_tokens=16))
    bench.submit(1, 800, tenant="a")
    run(bench, 4)
    bench.submit(3, 4, max_tokens=900, arrival_s=bench.now_s, tenant="c")
    bench.submit(2, 200, arrival_s=bench.now_s, tenant="b")
    run(bench, 60)
    assert bench.book[SeqId(2)].computed > 0


# ---- quotas


def quota_bench(policy: Policy) -> PlannerBench:
    """Return a bench in which tenant small holds its two blocks and seventy more of its sequences wait."""
    bench = PlannerBench(blocks=60, tokens=64, policy=policy, block_bytes=1)
    bench.submit(1, 7, max_tokens=2, tenant="small")
    bench.submit(2, 4, max_tokens=900, tenant="big")
    run(bench, 1)
    for seq in range(10, 80):
        bench.submit(seq, 8, arrival_s=0.0, tenant="small")
    return bench


def small() -> TenantShare:
    return TenantShare(name=TenantId("small"), weight=1000.0, kv_quota=KvQuota(hbm=2))


def test_a_tenant_at_its_quota_neither_blocks_nor_preempts_others() -> None:
    bench = quota_bench(fair(small()))
    bench.book[SeqId(1)].limit = 900  # never ends
    bench.submit(3, 8, arrival_s=0.05, tenant="big")
    plans = run(bench, 30)
    assert 3 in plans[0].admitted
    assert plans[0].at_quota == ("small",)
    assert bench.book.preemption_counts.total == 0
    assert not any(seq >= 10 for plan in plans for seq in plan.admitted)


def test_a_tenant_at_its_quota_does_not_delay_refills() -> None:
    bench = quota_bench(fair(small()))
    bench.book[SeqId(1)].limit = 900
    for seq in range(100, 140):
        bench.submit(seq, 8, arrival_s=0.05, max_tokens=3, tenant="big")
    fair_book = bench.book.policy.fair
    assert isinstance(fair_book, TenantBook)
    run(bench, 3)
    before = fair_book.num_refills
    run(bench, 10)
    assert fair_book.num_refills > before


def test_a_tenant_at_its_quota_does_not_take_the_aging_share_of_others() -> None:
    bench = quota_bench(fair(small()))
    bench.book[SeqId(1)].limit = bench.book[SeqId(2)].limit = 900
    bench.planner.set_limits(StepLimits(3, 64, block_bytes=1))
    bench.submit(1000, 8, arrival_s=1.0, band=5, tenant="last")
    for seq in range(100, 600):
        bench.submit(seq, 4, arrival_s=1.5, max_tokens=9, tenant="big")
    bench.now_s = 31.2
    assert 1000 in [seq for plan in run(bench, 40) for seq in plan.admitted]


def test_sequences_admitted_in_one_step_count_against_the_quota_together() -> None:
    bench = PlannerBench(blocks=60, tokens=64, policy=fair(small()), block_bytes=1)
    for seq in (1, 2, 3):
        bench.submit(seq, 7, tenant="small")
    assert step(bench).admitted == (1,)


@pytest.mark.parametrize("waiting", [1, 100])
def test_a_debtor_pauses_when_a_tenant_at_its_quota_is_first(waiting: int) -> None:
    heavy = TenantShare(name=TenantId("b"), weight=10.0)
    bench = PlannerBench(blocks=400, seqs=8, tokens=8, policy=fair(heavy, small()), block_bytes=1)
    bench.submit(1, 7, max_tokens=2, tenant="small")
    bench.book[SeqId(1)].limit = 900  # never ends
    bench.submit(2, 4, max_tokens=900, tenant="a")
    run(bench, 2)
    for seq in range(10, 10 + waiting):
        bench.submit(seq, 8, arrival_s=0.0, tenant="small")
    run(bench, 20)
    assert bench.planner.order(bench.now_s)[0] == 10
    bench.submit(3, 400, arrival_s=bench.now_s, tenant="b")
    plans = run(bench, 40)
    assert any(3 in seqs(plan) and 2 not in seqs(plan) for plan in plans), "the debtor never paused"


# ---- restores


class Loading(CountingCache):
    """A cache with two blocks of sequence 3 in a lower tier."""

    def match(self, seq: SeqId, *, may_load: bool = True) -> Hit | None:
        return Hit(2 * BLOCK, load_blocks=2) if seq == 3 else Hit(0)


def test_no_sequence_is_preempted_for_one_that_is_being_restored() -> None:
    bench = PlannerBench(seqs=2, policy=open_policy("priority"))
    bench.cache = Loading(100)
    for seq in (1, 2):
        bench.submit(seq, 4, max_tokens=900, band=1)
    step(bench)
    bench.submit(3, 12, band=0)
    assert victims(step(bench)) == (2,)
    assert step(bench).restores == (3,)
    plans = run(bench, 40)
    assert not any(victims(plan) for plan in plans)
    assert [seqs(plan) for plan in plans] == [[1]] * 40
    bench.book.restored(SeqId(3), 2 * BLOCK)
    assert (3, 2 * BLOCK, 4) in slices(step(bench))


# ---- earmarked room


def test_freed_room_is_not_kept_from_a_higher_band() -> None:
    bench = PlannerBench(blocks=10, seqs=4, tokens=64, policy=open_policy("priority"))
    bench.submit(1, 20, band=6)
    bench.submit(2, 12, band=6)
    bench.step()
    bench.submit(3, 30, band=5)  # no single victim frees enough blocks
    assert victims(bench.launch())
    bench.submit(4, 4, band=0)
    admitted = [seq for _ in range(4) for seq in bench.launch().admitted]
    assert admitted[0] == 4


# ---- victims behind their beneficiaries


def test_a_sequence_that_is_preempted_for_a_share_is_admitted_after_the_sequence_that_got_its_blocks() -> None:
    """The victim arrived first and its account is owed service, so its place in the queue is before the other one's."""
    policy = open_policy("fair", step_ms=10_000.0, patience_s=0.1)
    policy.set_tenants(Tenants(1, (TenantShare(name=TenantId("b"), weight=20.0),)), 0.0)
    bench = PlannerBench(blocks=30, seqs=4, tokens=128, policy=policy)
    bench.submit(1, 80, max_tokens=900, arrival_s=0.0, tenant="a")
    run(bench, 30)
    bench.submit(2, 60, max_tokens=4, arrival_s=bench.now_s, tenant="b")
    plans: list[Plan] = []
    while not (plans and victims(plans[-1])) and len(plans) < 200:
        plans.append(step(bench))
    (preemption,) = plans[-1].preemptions
    assert (preemption.victim, preemption.reason) == (1, "share")
    first, second = (bench.book.policy.sort_key(bench.book[SeqId(seq)]) for seq in (1, 2))
    assert first < second
    admitted = [seq for plan in run(bench, 12) for seq in plan.admitted]
    assert admitted == [2, 1]


def test_victims_whose_beneficiary_is_aborted_are_admitted_again() -> None:
    bench = PlannerBench(blocks=10, seqs=4, tokens=64, policy=open_policy("priority"))
    bench.submit(1, 32, band=6)
    bench.step()
    bench.submit(2, 30, band=5)
    assert victims(bench.launch()) == (1,)
    bench.book.finish(SeqId(2), FinishReason.ABORT, bench.now_s)
    assert bench.launch().admitted == (1,)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_only_a_policy_that_admits_by_band_preempts_by_band(policy: PolicyName) -> None:
    bench = PlannerBench(blocks=10, seqs=4, tokens=64, policy=open_policy(policy))
    bench.submit(1, 30, band=1, max_tokens=4)
    bench.step()
    bench.submit(2, 30, band=0, max_tokens=4)
    plans = run(bench, 20)
    taken = [seq for plan in plans for seq in victims(plan)]
    admitted = [seq for plan in plans for seq in plan.admitted]
    assert (taken, admitted) == ([], [2]) if policy == "fcfs" else ([1], [2, 1])
    assert not len(bench.book)


def test_a_change_of_policy_moves_sequences_between_bands() -> None:
    bench = PlannerBench(blocks=20, seqs=2, tokens=64, policy=open_policy("fcfs"))
    for seq, band in ((1, 3), (2, 1), (3, 2), (4, 0)):
        bench.submit(seq, 8, band=band)
    bench.step()
    assert {bench.book[SeqId(seq)].account.band for seq in (1, 2, 3, 4)} == {0}
    names: tuple[PolicyName, ...] = ("fair", "fcfs", "priority")
    for name in names:
        bench.book.switch_policy(name, bench.now_s, step_ms=10.0, patience_s=0.1)
        bench.book.check_integrity()
    assert [bench.book[SeqId(seq)].account.band for seq in (1, 2, 3, 4)] == [3, 1, 2, 0]
    assert [one.id for one in bench.book.running] == [2, 1]
    assert victims(bench.launch()) == (1,)
    assert bench.launch().admitted == (4,)


# ---- starving sequences


@pytest.mark.parametrize("policy", ["priority", "fair"])
def test_a_starving_sequence_that_needs_all_blocks_is_admitted(policy: PolicyName) -> None:
    bench = PlannerBench(blocks=20, seqs=4, tokens=64, policy=open_policy(policy, step_ms=20.0))
    numbers = iter(range(10, 10_000))

    def flood() -> None:
        while len(bench.book.waiting) < 6:
            bench.submit(next(numbers), 12, max_tokens=12, arrival_s=bench.now_s, tenant="flood")

    flood()
    run(bench, 4)
    bench.submit(1, 60, max_tokens=4, arrival_s=bench.now_s, band=5, tenant="last")
    began_s = bench.now_s
    while 1 in bench.book and bench.now_s < began_s + 60:
        flood()
        step(bench)
    assert 1 not in bench.book
    assert 30 <= bench.now_s - began_s < 40


def test_a_long_prompt_that_is_served_does_not_starve() -> None:
    bench = PlannerBench(blocks=400, tokens=8, policy=open_policy("fair", step_ms=20.0))
    bench.submit(1, 800, arrival_s=0.0, band=5, tenant="long")
    for _ in range(80):
        bench.now_s += 0.5
        bench.step()
    assert bench.now_s == 40.0
    assert bench.book.policy.starving(bench.now_s) is None
    bench.submit(2, 8, arrival_s=40.0, band=0, tenant="short")
    assert seqs(step(bench))[0] == 2


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_every_sequence_ends_despite_preemptions(policy: str) -> None:
    """Three bands, four tenants and few rows and blocks."""
    bench = PlannerBench(blocks=16, seqs=3, tokens=12, policy=open_policy(policy, step_ms=1.0, patience_s=0.1))  # type: ignore[arg-type]
    for seq in range(1, 40):
        bench.submit(
            seq, 1 + seq * 7 % 30, max_tokens=1 + seq * 5 % 20, arrival_s=0.0, band=seq % 3, tenant=f"t{seq % 4}"
        )
    left = 20_000
    while len(bench.book) and left:
        step(bench)
        left -= 1
    assert not len(bench.book)
    assert bench.cache.available_blocks == 16


@pytest.mark.parametrize("age_s", [0.0, 40.0])
@pytest.mark.parametrize("name", ["fair", "priority"])
def test_a_lower_band_is_preempted_for_a_starving_request_as_for_any_other(name: PolicyName, age_s: float) -> None:
    """The price of a preemption does not matter between bands, however long the request has waited."""
    bench = PlannerBench(blocks=60, seqs=4, tokens=16, policy=open_policy(name, step_ms=10.0, patience_s=0.1))
    bench.now_s = 100.0
    bench.submit(1, 200, max_tokens=30, band=1, arrival_s=100.0)
    run(bench, 14)
    bench.submit(2, 200, max_tokens=4, arrival_s=bench.now_s - age_s)
    plans = run(bench, 3)
    assert any(victims(plan) == (1,) for plan in plans)
