"""The counts of preemptions, and that they include every preemption of a run."""

from tests.engine.test_loop_tiers import TierBench
from tiercel.scheduler.preemption_counts import PreemptionCounts
from tiercel.values.ids import TenantId

A, B = TenantId("a"), TenantId("b")


def test_preemptions_are_counted_by_tenant_reason_and_mode() -> None:
    counts = PreemptionCounts()
    for is_swap in (True, True, False):
        counts.add(A, "debt", is_swap=is_swap)
    counts.add(A, "band", is_swap=True)
    expected = {("debt", "swap", 2), ("debt", "recompute", 1), ("band", "swap", 1)}
    assert {(one.reason, one.mode, one.count) for one in counts.of_tenant(A)} == expected
    assert counts.of_tenant(B) == ()
    assert list(counts.tenants) == [A]
    assert (counts.total, counts.num_swaps, counts.by_reason()) == (4, 3, {"debt": 3, "band": 1})


def test_every_preemption_of_a_run_is_counted_for_its_tenant() -> None:
    bench = TierBench(blocks=24, host=60, seqs=8)
    for number in range(8):
        bench.submit([number] * 12, max_tokens=50)
    bench.run()
    counted = sum(one.count for tenant in bench.book.fair_gauges(99.0).tenants for one in tenant.preemptions)
    ends = [end for report in bench.client.reports for end in report.finished]
    assert counted == sum(end.preemptions for end in ends) > 0
