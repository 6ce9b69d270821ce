"""The outcome of a sequence: tokens by tier, restored tokens, recomputed tokens."""

from tests.engine.test_loop_tiers import BYTES, TierBench
from tiercel.kvcache.tiers import TierLimits
from tiercel.values.outcome import MAX_ABSENCES
from tiercel.values.tier import Route

PROMPT = list(range(9)) * 5


def test_a_prefix_from_the_disk_is_reported_as_such() -> None:
    bench = TierBench(blocks=24, host=0, disk=100, limits=TierLimits(wanted_share=0.5))
    bench.submit(PROMPT, max_tokens=2)
    bench.run()
    for number in range(4):  # evict it from memory
        bench.submit([number + 5] * 60, max_tokens=2)
        bench.run()
    bench.submit(PROMPT, max_tokens=2)
    bench.run()
    reported = bench.client.finished[6]
    fetched = bench.mover.bytes_by_route[Route.PREFETCH] // BYTES * 4
    assert reported.num_cached == 44
    assert 0 < reported.num_cached_ssd == min(fetched, 44)
    assert reported.num_cached_ddr == reported.swapped_tokens == reported.recomputed_tokens == 0
    assert reported.absences == ()


def test_a_prefix_from_ddr_is_reported_with_the_wait_for_it() -> None:
    bench = TierBench(blocks=24, host=60)
    bench.submit(PROMPT, max_tokens=2)
    bench.run()
    for number in range(2):
        bench.submit([number + 5] * 60, max_tokens=2)
        bench.run()
    bench.submit(PROMPT, max_tokens=2)
    bench.run()
    reported = bench.client.finished[4]
    assert 0 < reported.num_cached_ddr <= reported.num_cached
    assert reported.num_cached_ssd == reported.swapped_tokens == bench.loop.gauges.read().swapped_tokens == 0
    (absence,) = reported.absences
    assert absence.reason is None
    request = bench.requests[4]
    assert request.arrival_s <= absence.start_s < absence.end_s == request.arrival_s + reported.queued_s


def test_victims_report_restored_and_recomputed_tokens_and_their_absences() -> None:
    bench = TierBench(blocks=24, seqs=8, limits=TierLimits(always_loads=True, has_write_back=False))
    for number in range(8):
        bench.submit([number] * 12, max_tokens=50)
    bench.run()
    ends = list(bench.client.finished.values())
    assert bench.book.preemption_counts.num_swaps > 0
    assert sum(end.swapped_tokens for end in ends) == bench.cache.swapped_tokens == bench.cache.loaded_tokens > 0
    assert sum(end.recomputed_tokens for end in ends) == bench.book.recomputed_tokens
    assert all(end.num_cached_ddr == end.num_cached_ssd == 0 for end in ends)
    for end in ends:
        assert len(end.absences) == min(end.preemptions, MAX_ABSENCES)
        assert all(one.start_s < one.end_s and one.reason is not None for one in end.absences)
        assert all(one.end_s <= other.start_s for one, other in zip(end.absences, end.absences[1:], strict=False))


def test_dropped_victims_are_recomputed_and_not_restored() -> None:
    bench = TierBench(blocks=24, host=0, seqs=8, mode="recompute")
    for number in range(8):
        bench.submit([number] * 12, max_tokens=50)
    bench.run()
    ends = list(bench.client.finished.values())
    assert sum(end.preemptions for end in ends) == bench.book.preemption_counts.total > 0
    assert sum(end.recomputed_tokens for end in ends) == bench.book.recomputed_tokens > 0
    assert all(end.swapped_tokens == 0 for end in ends)


def test_every_first_token_is_reported_once_with_its_start() -> None:
    bench = TierBench(blocks=24, seqs=4)
    for number in range(6):
        bench.submit([number] * 12, max_tokens=5)
    bench.run()
    firsts = {first.seq: first.started_s for report in bench.client.reports for first in report.firsts}
    assert set(firsts) == set(bench.requests)
    assert sum(len(report.firsts) for report in bench.client.reports) == 6
    for seq, started_s in firsts.items():
        assert started_s == bench.requests[seq].arrival_s + bench.client.finished[seq].queued_s
