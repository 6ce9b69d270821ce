"""The planner over a cache that only counts blocks."""

import pytest

from tests.scheduler.planner_bench import BLOCK, PlannerBench, slices, victims
from tiercel.scheduler.chunk import chunk_length
from tiercel.scheduler.policy import open_policy
from tiercel.scheduler.step_limits import StepLimits
from tiercel.values.errors import InvariantError
from tiercel.values.ids import SeqId
from tiercel.values.outcome import FinishReason
from tiercel.values.plan import Slice
from tiercel.values.tenant import PolicyName


@pytest.mark.parametrize(
    ("start", "want", "budget", "length"),
    [
        (0, 40, 10, 8),  # ends on a block boundary
        (0, 8, 10, 8),  # finishes
        (0, 40, 3, 3),  # below a block: the whole budget
        (3, 40, 3, 1),  # to the boundary
        (3, 40, 6, 5),
        (6, 40, 1, 1),
        (5, 3, 100, 3),
    ],
)
def test_chunks_end_on_block_boundaries_if_the_budget_reaches_one(
    start: int, want: int, budget: int, length: int
) -> None:
    assert chunk_length(start, want, budget, BLOCK) == length


def test_a_long_prompt_is_chunked_beside_running_decodes() -> None:
    bench = PlannerBench(tokens=10)
    bench.submit(1, 4)
    bench.step()
    bench.submit(2, 30)
    assert slices(bench.step()) == [(1, 4, 1), (2, 0, 8)]
    assert slices(bench.step()) == [(1, 5, 1), (2, 8, 8)]


def test_with_capped_forwards_every_decode_gets_its_token_and_prompts_the_rest() -> None:
    bench = PlannerBench(tokens=32, seqs=4)
    for seq in (1, 2, 3):
        bench.submit(seq, 1)
    bench.step()
    bench.submit(4, 30)
    bench.planner.cap_forwards(2)
    plan = bench.step()
    assert [[piece.seq for piece in batch.slices] for batch in plan.nano_batches] == [[1, 2], [3, 4]]
    assert slices(plan)[-1] == (4, 0, 1)
    bench.planner.cap_forwards(8)
    assert slices(bench.step())[-1] == (4, 1, 3)  # five tokens are left; the block ends after three
    bench.planner.cap_forwards(100)
    assert slices(bench.step())[-1] == (4, 4, 26)
    bench.planner.cap_forwards(None)
    assert len(bench.step().nano_batches) == 1


def test_the_highest_rank_gets_a_token_when_decodes_fill_the_budget() -> None:
    bench = PlannerBench(tokens=3, seqs=4)
    bench.submit(1, 40, arrival_s=0.0)
    bench.step()
    for seq in (2, 3, 4):
        bench.submit(seq, 1)
    for _ in range(30):
        bench.step()
    assert bench.book[SeqId(1)].computed > 30


def test_one_prompt_takes_at_most_the_threshold_of_a_step() -> None:
    bench = PlannerBench(tokens=64, threshold=8)
    bench.submit(1, 40)
    bench.submit(2, 40)
    assert slices(bench.step()) == [(1, 0, 8), (2, 0, 8)]


def test_a_prefix_hit_skips_cached_tokens_and_samples_at_the_end() -> None:
    bench = PlannerBench(hits={1: 8})
    bench.submit(1, 11)
    plan = bench.step()
    assert plan.nano_batches[0].slices == (Slice(SeqId(1), 8, 3, True),)
    assert bench.book[SeqId(1)].num_found == 8


def test_a_sequence_that_waits_for_a_prefix_in_flight_does_not_block_others() -> None:
    bench = PlannerBench(hits={1: None})
    bench.submit(1, 8)
    bench.submit(2, 8)
    assert slices(bench.step()) == [(2, 0, 8)]


@pytest.mark.parametrize(("policy", "others"), [("fcfs", 100), ("fair", 100), ("fair", 250)])
def test_many_sequences_that_wait_for_a_prefix_in_flight_do_not_block_others(policy: PolicyName, others: int) -> None:
    last = others + 1
    bench = PlannerBench(hits=dict.fromkeys(range(1, last)), policy=open_policy(policy))
    for seq in range(1, last):
        bench.submit(seq, 8)
    bench.submit(last, 8, band=int(policy == "fair"))
    assert bench.step().admitted == (last,)


@pytest.mark.parametrize("policy", ["fcfs", "fair", "priority"])
@pytest.mark.parametrize("longs", [63, 70, 900])
def test_the_limit_on_long_prompts_does_not_block_short_ones_behind_them(policy: PolicyName, longs: int) -> None:
    bench = PlannerBench(blocks=40_000, policy=open_policy(policy))
    bench.planner.set_limits(StepLimits(8, 96, max_long_partial_prefills=1, long_prompt_tokens=100))
    for seq in range(1, longs + 1):
        bench.submit(seq, 250)
    bench.step()
    bench.submit(5000, 8, arrival_s=5000.0)
    assert any(5000 in bench.step().admitted for _ in range(4))


def test_the_limit_on_long_prompts_holds_when_many_wait() -> None:
    bench = PlannerBench(blocks=200_000, seqs=64, tokens=512)
    bench.planner.set_limits(StepLimits(64, 512, max_long_partial_prefills=1, long_prompt_tokens=100))
    for seq in range(1, 1200):
        bench.submit(seq, 600)
    bench.step()
    assert len(bench.book.running) == 1


def test_a_step_matches_the_prefixes_of_a_limited_number_of_sequences() -> None:
    bench = PlannerBench(hits=dict.fromkeys(range(1, 1000)))
    for seq in range(1, 1000):
        bench.submit(seq, 8)
    assert bench.step().deferred == tuple(range(1, 257))


def test_the_limits_are_lifted_when_the_first_sequence_is_not_served_even_if_it_changes() -> None:
    bench = PlannerBench(seqs=1)
    bench.submit(1, 4, arrival_s=0.0)
    bench.step()
    is_starving: list[bool] = []
    for seq in range(2, 12):
        bench.submit(seq, 4, arrival_s=20.0 - seq)
        is_starving.append(bench.starvation.is_starving)
        bench.step()
    assert is_starving == [False] * 8 + [True] * 2


def test_the_limits_hold_while_the_first_sequence_is_deferred() -> None:
    bench = PlannerBench(hits={1: None})
    bench.submit(1, 8)
    for _ in range(20):
        bench.step()
        assert not bench.starvation.is_starving


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_another_tenant_may_pass_a_blocked_sequence_only_under_fair(policy: PolicyName) -> None:
    bench = PlannerBench(blocks=10, tokens=64, policy=open_policy(policy))
    bench.submit(1, 20, tenant="b")
    bench.step()
    bench.submit(2, 30, tenant="a")
    bench.submit(3, 4, tenant="b")
    assert bench.step().admitted == ((3,) if policy == "fair" else ())


def test_no_sequence_passes_one_that_does_not_fit() -> None:
    bench = PlannerBench(blocks=6, tokens=64)
    bench.submit(1, 12)
    bench.submit(2, 30)
    bench.submit(3, 2)
    assert [seq for seq, _, _ in slices(bench.step())] == [1]


def test_the_lowest_rank_is_preempted_and_waits_again() -> None:
    bench = PlannerBench(blocks=6, tokens=64)
    bench.submit(1, 9)
    bench.submit(2, 4)
    bench.step()
    for _ in range(20):
        if victims(bench.step()):
            break
    assert bench.cache.released == [2]
    assert list(bench.book.waiting) == [2]
    assert bench.book[SeqId(2)].computed == 0
    assert bench.book[SeqId(2)].num_outputs > 0  # its output is kept


def test_a_victim_with_a_slice_in_flight_keeps_the_token_of_that_step() -> None:
    bench = PlannerBench(blocks=6, tokens=64)
    bench.submit(1, 9)
    bench.submit(2, 4)
    flights = [bench.launch()]
    while not victims(flights[-1]):
        flights.append(bench.launch())
        if not victims(flights[-1]):
            bench.commit(flights.pop(0))
    num_outputs = bench.book[SeqId(2)].num_outputs
    bench.commit(flights.pop(0))
    assert bench.book[SeqId(2)].num_outputs == num_outputs + 1
    assert list(bench.book.waiting) == [2]


def test_no_slice_is_planned_beyond_max_tokens() -> None:
    bench = PlannerBench()
    bench.submit(1, 4, max_tokens=2)
    first = bench.launch()
    second = bench.launch()
    assert slices(second) == [(1, 4, 1)]
    assert slices(bench.launch()) == []
    bench.commit(first)
    commit = bench.book.commit(second.nano_batches, [5], 0.0)
    assert [finished.reason for finished in commit.finished] == [FinishReason.LENGTH]


def test_a_ghost_slice_is_discarded() -> None:
    bench = PlannerBench()
    bench.submit(1, 4)
    first = bench.launch()
    ghost = bench.launch()
    commit = bench.book.commit(first.nano_batches, [2], 0.0)
    assert commit.finished[0].stop_token == 2
    commit = bench.book.commit(ghost.nano_batches, [7], 0.0)
    assert (commit.sampled, commit.progress, commit.finished) == ([], [], [])


def test_max_num_seqs_is_kept() -> None:
    bench = PlannerBench(seqs=2, tokens=64)
    for seq in range(1, 5):
        bench.submit(seq, 4)
    assert [seq for seq, _, _ in slices(bench.step())] == [1, 2]


def test_a_sequence_is_added_once() -> None:
    bench = PlannerBench()
    bench.submit(1, 4)
    with pytest.raises(InvariantError):
        bench.submit(1, 4)


def test_a_waiting_high_band_preempts_a_low_one_when_the_rows_are_full() -> None:
    bench = PlannerBench(seqs=2, policy=open_policy("priority"))
    for seq in (1, 2):
        bench.submit(seq, prompt=3, band=1)
    bench.commit(bench.launch())
    bench.submit(3, prompt=3, band=0)
    assert victims(bench.launch()) == (2,)
    plan = bench.launch()
    assert plan.admitted == (3,)
    assert victims(bench.launch()) == ()


def test_a_changed_priority_of_a_running_sequence_changes_the_victim() -> None:
    bench = PlannerBench(seqs=2, policy=open_policy("priority"))
    for seq in (1, 2):
        bench.submit(seq, prompt=3, band=1)
    bench.commit(bench.launch())
    bench.book.move(SeqId(1), 5)
    bench.submit(3, prompt=3, band=2)
    assert victims(bench.launch()) == (1,)
    bench.book.check_integrity()


def test_a_plan_lists_the_next_sequences_in_order() -> None:
    bench = PlannerBench(seqs=2, tokens=64)
    for seq in (3, 1, 2, 4):
        bench.submit(seq, 8)
    plan = bench.step()
    assert plan.admitted == (1, 2)
    assert plan.next_order == (3, 4)


def test_the_listed_order_is_limited() -> None:
    bench = PlannerBench(seqs=1)
    for seq in range(1, 100):
        bench.submit(seq, 8)
    order = bench.planner.order(0.0)
    assert order == tuple(range(1, 65))
    assert bench.planner.plan(bench.cache, 0.0, order).next_order == order[1:]


def test_a_starving_sequence_is_listed_first_when_many_are_before_it() -> None:
    bench = PlannerBench(seqs=1, tokens=64, policy=open_policy("fair"))
    bench.submit(1, 8, max_tokens=500)
    bench.step()
    for seq in range(2, 102):
        bench.submit(seq, 8, arrival_s=10.0)
    bench.submit(200, 8, arrival_s=0.0, band=5, tenant="last")
    bench.now_s = 29.0
    assert 200 not in bench.planner.order(bench.now_s)
    bench.now_s = 30.0
    order = bench.planner.order(bench.now_s)
    assert order[0] == 200
    assert len(order) == 64
    plan = bench.planner.plan(bench.cache, bench.now_s, order)
    assert plan.next_order[0] == 200
