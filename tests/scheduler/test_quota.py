"""What a tenant's quota of KV does to those of it that run: they grow within it, and only its own give way."""

from tests.scheduler.planner_bench import BLOCK, PlannerBench, victims
from tiercel.ids import SeqId, TenantId
from tiercel.plan import Plan
from tiercel.scheduler.policy import open_policy
from tiercel.tenant import KvQuota, Tenants, TenantShare


def quota_bench(quota: int, *, tokens: int = 64) -> PlannerBench:
    """Tenant small may hold so many blocks; there is room for many more."""
    policy = open_policy("fcfs")
    share = TenantShare(name=TenantId("small"), kv_quota=KvQuota(hbm=quota))
    policy.set_tenants(Tenants(1, (share,)), 0.0)
    return PlannerBench(blocks=400, seqs=16, tokens=tokens, policy=policy, block_bytes=1)


def held(bench: PlannerBench) -> int:
    return sum(bench.cache.num_blocks(one.id) for one in bench.book.running if one.request.tenant == "small")


def run(bench: PlannerBench, most_steps: int = 2000) -> list[Plan]:
    """To the end."""
    plans: list[Plan] = []
    while len(bench.book) and len(plans) < most_steps:
        plans.append(bench.step())
    assert not len(bench.book), "somebody is stuck"
    return plans


def test_who_grows_beyond_its_tenants_quota_takes_from_the_newest_of_that_tenant() -> None:
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
    assert set(preempted) <= {3, 4}, "only the tenant's own, and never its oldest"
    assert bench.cache.available_blocks == 400


def test_the_newest_waits_with_its_blocks_while_the_quota_is_full_and_keeps_nobody_out() -> None:
    bench = quota_bench(6)
    bench.submit(1, 9, max_tokens=4, tenant="small")
    bench.submit(2, 6, max_tokens=40, tenant="small")
    bench.step()
    oldest = bench.book[SeqId(1)]
    oldest.limit = oldest.num_tokens  # it keeps its three blocks and wants nothing
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


def test_a_sequence_alone_that_was_accepted_under_a_larger_quota_goes_on() -> None:
    bench = quota_bench(8)
    bench.submit(1, 20, max_tokens=40, tenant="small")
    bench.submit(2, 4, max_tokens=40, tenant="small")
    bench.step()
    bench.cache.quota_by_tenant["small"] = 2
    plans = run(bench)
    assert [victims(plan) for plan in plans if victims(plan)] == [(2,)]


def test_prompts_under_way_count_whole_against_the_quota() -> None:
    bench = quota_bench(20, tokens=8)
    bench.submit(1, 15 * BLOCK, max_tokens=4, tenant="small")
    bench.submit(2, 10 * BLOCK, max_tokens=4, tenant="small")
    plans = run(bench)
    assert plans[0].admitted == (1,)
    assert not bench.book.preemption_counts.total, "it came too early"
