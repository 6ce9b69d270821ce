"""The planner against a cache that only counts."""

import pytest

from tests.scheduler.counting import BLOCK, Room, slices
from tiercel.errors import InvariantError
from tiercel.ids import SeqId
from tiercel.outcome import FinishReason
from tiercel.plan import Slice
from tiercel.scheduler.chunk import chunk_length
from tiercel.scheduler.policy import open_policy
from tiercel.scheduler.step_limits import StepLimits
from tiercel.scheduler.victim import PreemptionLimiter
from tiercel.settings import PolicyName


@pytest.mark.parametrize(
    ("start", "want", "budget", "length"),
    [
        (0, 40, 10, 8),  # ends on a block boundary
        (0, 8, 10, 8),  # finishes
        (0, 40, 3, 3),  # less than a block: takes the budget as it is
        (3, 40, 3, 1),  # to the boundary
        (3, 40, 6, 5),
        (6, 40, 1, 1),
        (5, 3, 100, 3),
    ],
)
def test_chunks_end_on_block_boundaries_where_they_can(start: int, want: int, budget: int, length: int) -> None:
    assert chunk_length(start, want, budget, BLOCK) == length


def test_a_long_prompt_is_chunked_beside_running_decodes() -> None:
    room = Room(tokens=10)
    room.submit(1, 4)
    room.step()
    room.submit(2, 30)
    assert slices(room.step()) == [(1, 4, 1), (2, 0, 8)]
    assert slices(room.step()) == [(1, 5, 1), (2, 8, 8)]


def test_capped_forwards_give_every_decode_its_token_and_prompts_what_is_left() -> None:
    room = Room(tokens=32, seqs=4)
    for seq in (1, 2, 3):
        room.submit(seq, 1)
    room.step()
    room.submit(4, 30)
    room.planner.cap_forwards(2)
    plan = room.step()
    assert [[piece.seq for piece in batch.slices] for batch in plan.nano_batches] == [[1, 2], [3, 4]]
    assert slices(plan)[-1] == (4, 0, 1)
    room.planner.cap_forwards(8)
    assert slices(room.step())[-1] == (4, 1, 3)  # five tokens are left, to where a block ends three
    room.planner.cap_forwards(100)
    assert slices(room.step())[-1] == (4, 4, 26)
    room.planner.cap_forwards(None)
    assert len(room.step().nano_batches) == 1


def test_the_first_in_rank_gets_a_token_when_decodes_fill_the_budget() -> None:
    room = Room(tokens=3, seqs=4)
    room.submit(1, 40, arrival_s=0.0)
    room.step()
    for seq in (2, 3, 4):
        room.submit(seq, 1)
    for _ in range(30):
        room.step()
    assert room.book[SeqId(1)].computed > 30


def test_one_prompt_takes_at_most_the_threshold_of_a_step() -> None:
    room = Room(tokens=64, threshold=8)
    room.submit(1, 40)
    room.submit(2, 40)
    assert slices(room.step()) == [(1, 0, 8), (2, 0, 8)]


def test_a_prefix_hit_skips_what_is_computed_and_samples_at_the_end() -> None:
    room = Room(hits={1: 8})
    room.submit(1, 11)
    plan = room.step()
    assert plan.nano_batches[0].slices == (Slice(SeqId(1), 8, 3, True),)
    assert room.book[SeqId(1)].num_cached == 8


def test_who_waits_for_a_prefix_in_flight_lets_others_pass() -> None:
    room = Room(hits={1: None})
    room.submit(1, 8)
    room.submit(2, 8)
    assert slices(room.step()) == [(2, 0, 8)]


@pytest.mark.parametrize(("policy", "others"), [("fcfs", 100), ("fair", 100), ("fair", 250)])
def test_however_many_wait_for_a_prefix_in_flight_they_hide_nobody(policy: PolicyName, others: int) -> None:
    last = others + 1
    room = Room(hits=dict.fromkeys(range(1, last)), policy=open_policy(policy))
    for seq in range(1, last):
        room.submit(seq, 8)
    room.submit(last, 8, band=int(policy == "fair"))
    assert room.step().admitted == (last,)


@pytest.mark.parametrize("policy", ["fcfs", "fair", "priority"])
@pytest.mark.parametrize("longs", [63, 70, 900])
def test_the_limit_on_long_prompts_hides_no_short_one_behind_them(policy: PolicyName, longs: int) -> None:
    room = Room(blocks=40_000, policy=open_policy(policy))
    room.planner.set_limits(StepLimits(8, 96, max_long_partial_prefills=1, long_prompt_tokens=100))
    for seq in range(1, longs + 1):
        room.submit(seq, 250)
    room.step()
    room.submit(5000, 8, arrival_s=5000.0)
    assert any(5000 in room.step().admitted for _ in range(4))


def test_the_limit_on_long_prompts_holds_however_many_wait() -> None:
    room = Room(blocks=200_000, seqs=64, tokens=512)
    room.planner.set_limits(StepLimits(64, 512, max_long_partial_prefills=1, long_prompt_tokens=100))
    for seq in range(1, 1200):
        room.submit(seq, 600)
    room.step()
    assert len(room.book.running) == 1


def test_a_step_asks_only_so_many_about_their_prefixes() -> None:
    room = Room(hits=dict.fromkeys(range(1, 1000)))
    for seq in range(1, 1000):
        room.submit(seq, 8)
    assert room.step().deferred == tuple(range(1, 257))


@pytest.fixture
def is_void_by_step(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each step that is planned: whether its brake is void."""
    seen: list[bool] = []

    def brake(*, is_void: bool) -> PreemptionLimiter:
        seen.append(is_void)
        return PreemptionLimiter(is_void=is_void)

    monkeypatch.setattr("tiercel.scheduler.planner.PreemptionLimiter", brake)
    return seen


def test_the_brake_is_void_when_nobody_who_is_first_is_served_whoever_it_is(is_void_by_step: list[bool]) -> None:
    room = Room(seqs=1)
    room.submit(1, 4, arrival_s=0.0)
    room.step()
    for seq in range(2, 12):
        room.submit(seq, 4, arrival_s=20.0 - seq)
        room.step()
    assert is_void_by_step == [False] * 9 + [True] * 2


def test_the_brake_holds_while_the_first_waits_for_something_on_its_way(is_void_by_step: list[bool]) -> None:
    room = Room(hits={1: None})
    room.submit(1, 8)
    for _ in range(20):
        room.step()
    assert not any(is_void_by_step)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_no_other_tenant_passes_on_space_where_tenants_do_not_count(policy: PolicyName) -> None:
    room = Room(blocks=10, tokens=64, policy=open_policy(policy))
    room.submit(1, 20, tenant="b")
    room.step()
    room.submit(2, 30, tenant="a")
    room.submit(3, 4, tenant="b")
    assert room.step().admitted == ((3,) if policy == "fair" else ())


def test_nobody_passes_on_space() -> None:
    room = Room(blocks=6, tokens=64)
    room.submit(1, 12)
    room.submit(2, 30)
    room.submit(3, 2)
    assert [seq for seq, _, _ in slices(room.step())] == [1]


def test_the_last_in_rank_gives_way_and_waits_at_its_rank() -> None:
    room = Room(blocks=6, tokens=64)
    room.submit(1, 9)
    room.submit(2, 4)
    room.step()
    for _ in range(20):
        if room.step().victims:
            break
    assert room.cache.released == [2]
    assert list(room.book.waiting) == [2]
    assert room.book[SeqId(2)].computed == 0
    assert room.book[SeqId(2)].num_outputs > 0  # what it has said stays said


def test_a_victim_with_a_slice_in_flight_keeps_the_token_of_that_step() -> None:
    room = Room(blocks=6, tokens=64)
    room.submit(1, 9)
    room.submit(2, 4)
    flights = [room.launch()]
    while not flights[-1].victims:
        flights.append(room.launch())
        if not flights[-1].victims:
            room.commit(flights.pop(0))
    said = room.book[SeqId(2)].num_outputs
    room.commit(flights.pop(0))
    assert room.book[SeqId(2)].num_outputs == said + 1
    assert list(room.book.waiting) == [2]


def test_nothing_is_planned_past_max_tokens() -> None:
    room = Room()
    room.submit(1, 4, max_tokens=2)
    first = room.launch()
    second = room.launch()
    assert slices(second) == [(1, 4, 1)]
    assert slices(room.launch()) == []
    room.commit(first)
    commit = room.book.commit(second.nano_batches, [5], 0.0)
    assert [finished.reason for finished in commit.finished] == [FinishReason.LENGTH]


def test_a_ghost_slice_is_discarded() -> None:
    room = Room()
    room.submit(1, 4)
    first = room.launch()
    ghost = room.launch()
    commit = room.book.commit(first.nano_batches, [2], 0.0)
    assert commit.finished[0].stop_token == 2
    commit = room.book.commit(ghost.nano_batches, [7], 0.0)
    assert (commit.said, commit.progress, commit.finished) == ([], [], [])


def test_max_num_seqs_is_kept() -> None:
    room = Room(seqs=2, tokens=64)
    for seq in range(1, 5):
        room.submit(seq, 4)
    assert [seq for seq, _, _ in slices(room.step())] == [1, 2]


def test_a_sequence_is_added_once() -> None:
    room = Room()
    room.submit(1, 4)
    with pytest.raises(InvariantError):
        room.submit(1, 4)


def test_a_waiting_high_band_takes_the_place_of_a_low_one_even_when_the_rows_are_full() -> None:
    room = Room(seqs=2, policy=open_policy("priority"))
    for seq in (1, 2):
        room.submit(seq, prompt=3, band=1)
    room.commit(room.launch())
    room.submit(3, prompt=3, band=0)
    assert room.launch().victims == (2,)
    plan = room.launch()
    assert plan.admitted == (3,)
    assert room.launch().victims == ()


def test_a_priority_that_changes_while_a_sequence_runs_changes_who_gives_way() -> None:
    room = Room(seqs=2, policy=open_policy("priority"))
    for seq in (1, 2):
        room.submit(seq, prompt=3, band=1)
    room.commit(room.launch())
    room.book.move(SeqId(1), 5)
    room.submit(3, prompt=3, band=2)
    assert room.launch().victims == (1,)
    room.book.check_integrity()


def test_a_plan_publishes_who_comes_next_in_order() -> None:
    room = Room(seqs=2, tokens=64)
    for seq in (3, 1, 2, 4):
        room.submit(seq, 8)
    plan = room.step()
    assert plan.admitted == (1, 2)
    assert plan.next_order == (3, 4)


def test_the_published_order_ends_somewhere() -> None:
    room = Room(seqs=1)
    for seq in range(1, 100):
        room.submit(seq, 8)
    order = room.planner.order(0.0)
    assert order == tuple(range(1, 65))
    assert room.planner.plan(room.cache, 0.0, order).next_order == order[1:]


def test_who_starves_is_published_and_comes_first_however_many_stand_before() -> None:
    room = Room(seqs=1, tokens=64, policy=open_policy("fair"))
    room.submit(1, 8, max_tokens=500)
    room.step()
    for seq in range(2, 102):
        room.submit(seq, 8, arrival_s=10.0)
    room.submit(200, 8, arrival_s=0.0, band=5, tenant="last")
    room.now_s = 29.0
    assert 200 not in room.planner.order(room.now_s)
    room.now_s = 30.0
    order = room.planner.order(room.now_s)
    assert order[0] == 200
    assert len(order) == 64
    plan = room.planner.plan(room.cache, room.now_s, order)
    assert plan.next_order[0] == 200
