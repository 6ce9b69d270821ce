"""Who gave way, and that every preemption is somebody's."""

from tests.engine.test_loop_tiers import TierBench
from tiercel.ids import TenantId
from tiercel.outcome import PreemptionCount
from tiercel.scheduler.preemption_counts import PreemptionCounts

A, B = TenantId("a"), TenantId("b")


def test_preemptions_are_told_by_reason_and_mode() -> None:
    tally = PreemptionCounts()
    for is_swap in (True, True, False):
        tally.add(A, "debt", is_swap=is_swap)
    tally.add(A, "band", is_swap=True)
    expected = {("debt", "swap", 2), ("debt", "recompute", 1), ("band", "swap", 1)}
    assert {(one.reason, one.mode, one.count) for one in tally.of(A)} == expected
    assert tally.of(B) == ()
    assert list(tally.tenants) == [A]


def test_every_preemption_of_a_run_is_some_tenants() -> None:
    bench = TierBench(blocks=24, host=60, seqs=8)
    for number in range(8):
        bench.submit([number] * 12, max_tokens=50)
    bench.run()
    told = [count for tenant in bench.book.standing(99.0).tenants for count in tenant.preemptions]
    assert sum(count.count for count in told) == bench.book.num_preemptions > 0
    assert sum(count.count for count in told if count.mode == "swap") == bench.book.num_swapped
    by_reason = {count.reason: count.count for count in told if isinstance(count, PreemptionCount)}
    assert by_reason.keys() == bench.book.preemptions_by_reason.keys()
