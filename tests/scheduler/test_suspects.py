"""After a failed step its sequences run alone, and others are preempted for them."""

from tests.scheduler.planner_bench import CountingCache, PlannerBench, slices, victims
from tiercel.scheduler.policy import open_policy
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.tenant import KvQuota, Tenants, TenantShare


class SpillingCache(CountingCache):
    """A cache in which the blocks of a victim are not free at once, because its copies have to land first."""

    def release(self, seq: SeqId, *, spills: bool = False) -> None:
        before = self.available_blocks
        super().release(seq, spills=spills)
        self.coming_blocks += self.available_blocks - before
        self.available_blocks = before


def test_a_waiting_suspect_holds_no_blocks_until_it_is_admitted() -> None:
    bench = PlannerBench(tokens=16)
    bench.cache = SpillingCache(20, hits={2: 4})
    bench.submit(1, 7)
    bench.submit(2, 5)
    bench.step()
    failing = bench.launch()
    bench.cache.available_blocks = 0
    assert victims(bench.launch()) == (2,), "its slice is in flight, so it drains"
    bench.book.void(failing.nano_batches, bench.now_s, is_suspect=True)
    assert slices(bench.step()) == [(1, 7, 1)]
    plan = bench.launch()
    assert (victims(plan), plan.admitted) == ((1,), ())
    assert bench.cache.num_blocks(SeqId(2)) == 0, "hits that were sealed with the plan would be held and matched again"


def test_a_suspect_preempts_sequences_of_its_own_tenant_at_a_full_quota() -> None:
    policy = open_policy("fcfs")
    policy.set_tenants(Tenants(1, (TenantShare(name=TenantId("small"), kv_quota=KvQuota(hbm=5)),)), 0.0)
    bench = PlannerBench(blocks=400, policy=policy, block_bytes=1)
    bench.submit(1, 3, tenant="big")
    bench.submit(2, 7, max_tokens=5, tenant="small")
    bench.submit(3, 6, max_tokens=5, tenant="small")
    bench.step()
    bench.cache.quota_by_tenant["small"] = 4
    failing = bench.launch()
    behind = bench.launch()
    assert victims(behind) == (3,), "the tenant is at its quota"
    bench.book.void(failing.nano_batches, bench.now_s, is_suspect=True)
    bench.book.void(behind.nano_batches, bench.now_s, is_suspect=False)
    preempted: list[int] = []
    while bench.book.num_suspects:
        preempted += victims(bench.step())
        assert bench.cache.num_blocks(SeqId(2)) + bench.cache.num_blocks(SeqId(3)) <= 4
    assert preempted == [2]
