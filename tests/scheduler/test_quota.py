"""A tenant's quota of KV while its sequences run: they grow within it, and only its own are preempted."""

from tests.scheduler.planner_bench import BLOCK, PlannerBench, victims
from tiercel.scheduler.policy import open_policy
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.plan import Plan
from tiercel.values.tenant import KvQuota, Tenants, TenantShare


def quota_bench(quota: int, *, tokens: int = 64) -> PlannerBench:
    """Return a bench with 400 blocks, of which tenant small may hold `quota`."""
    policy = open_policy("fcfs")
    share = TenantShare(name=TenantId("small"), kv_quota=KvQuota(hbm=quota))
    policy.set_tenants(Tenants(1, (share,)), 0.0)
    return PlannerBench(blocks=400, seqs=16, tokens=tokens, policy=policy, block_bytes=1)


def held(bench: PlannerBench) -> int:
    return sum(bench.cache.num_blocks(one.id) for one in bench.book.running if one.request.tenant == "small")


def run(bench: PlannerBench, max_steps: int = 2000) -> list[Plan]:
    """Step until all sequences have ended."""
    plans: list[Plan] = []
    while len(bench.book) and len(plans) < max_steps:
        plans.append(bench.step())
    assert not len(bench.book), "a sequence is stuck"
    return plans


def test_a_sequence_that_grows_beyond_the_quota_preempts_the_newest_of_its_tenant() -> None:
    bench = quota_bench(8)
    bench.submit(1, 4, max_tokens=24, tenant="big")
    for seq in (2, 3, 4):
        bench.submit(seq, 4, max_tokens=24, tenant="small")
    bench.submit(5, 4, max_tokens=24, tenant="big")
    most, preempted = 0, list[int]()
    for _ in range(400):
        plan = bench.step()
        preempted += victims(plan)
        most = max(most, held(bench))
    assert not len(bench.book)
    assert most == 8
    assert preempted[0] == 4
    assert set(preempted) <= {3, 4}, "only the tenant's own sequences, and never its oldest"
    assert bench.cache.available_blocks == 400


def test_the_newest_sequence_keeps_its_blocks_at_a_full_quota_and_blocks_no_other_tenant() -> None:
    bench = quota_bench(6)
    bench.submit(1, 9, max_tokens=4, tenant="small")
    bench.submit(2, 6, max_tokens=40, tenant="small")
    bench.step()
    oldest = bench.book[SeqId(1)]
    oldest.limit = oldest.num_tokens  # keeps its three blocks and wants no more
    for _ in range(20):
        bench.step()
    assert (held(bench), bench.book[SeqId(2)].num_tokens) == (6, 3 * BLOCK + 1)
    bench.submit(3, 4, max_tokens=60, tenant="big")
    assert 3 in bench.step().admitted
    plans = [bench.step() for _ in range(10)]
    assert bench.book[SeqId(3)].num_outputs == 11
    oldest.limit = 13
    plans += run(bench)
    assert not any(victims(plan) for plan in plans)


def test_a_single_sequence_accepted_under_a_larger_quota_continues() -> None:
    bench = quota_bench(8)
    bench.submit(1, 20, max_tokens=40, tenant="small")
    bench.submit(2, 4, max_tokens=40, tenant="small")
    bench.step()
    bench.cache.quota_by_tenant["small"] = 2
    plans = run(bench)
    assert [victims(plan) for plan in plans if victims(plan)] == [(2,)]


def test_running_prompts_count_against_the_quota_as_a_whole() -> None:
    bench = quota_bench(20, tokens=8)
    bench.submit(1, 15 * BLOCK, max_tokens=4, tenant="small")
    bench.submit(2, 10 * BLOCK, max_tokens=4, tenant="small")
    plans = run(bench)
    assert plans[0].admitted == (1,)
    assert not bench.book.preemption_counts.total, "the second prompt was admitted too early"
