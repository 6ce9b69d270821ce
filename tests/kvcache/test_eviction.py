"""Segments alone: order, the search that spares owners, the protected share."""

import random

import numpy as np
import pytest

from tests.seeds import fresh_seeds
from tiercel.kvcache.eviction import SEARCH_DEPTH, RetentionClass, Segments
from tiercel.kvcache.slot_index import SlotIndex


def filled(*classes: RetentionClass) -> Segments:
    """Slots 1, 2, ... released in this order."""
    segments = Segments(len(classes) + 1)
    for slot, retention in enumerate(classes, 1):
        segments.classes[slot] = retention
        segments.add(slot)
    return segments


def test_segments_go_in_order_and_in_each_the_oldest_first() -> None:
    segments = filled(
        RetentionClass.WANTED,
        RetentionClass.ONCE,
        RetentionClass.SHADOW,
        RetentionClass.ONCE,
        RetentionClass.REUSED,
        RetentionClass.PREEMPTED,
        RetentionClass.SHADOW,
    )
    assert list(segments) == [3, 7, 2, 4, 5, 1, 6]
    assert segments.victims(3) == [3, 7, 2]
    assert segments.victims(99) == list(segments)
    assert segments.victims(0) == []


def test_a_removed_slot_comes_back_as_the_newest() -> None:
    segments = filled(*[RetentionClass.ONCE] * 5)
    for slot in (3, 2, 5):
        segments.remove(slot)
    assert list(segments) == [1, 4]
    segments.add(2)
    assert list(segments) == [1, 4, 2]
    assert segments.check()


@pytest.mark.parametrize("seed", range(20))
def test_a_moved_slot_is_the_newest_of_its_segment(seed: int) -> None:
    rng = random.Random(seed)
    classes = [rng.choice(list(RetentionClass)) for _ in range(30)]
    segments = filled(*classes)
    order = {
        retention: [slot for slot, kept in enumerate(classes, 1) if kept is retention] for retention in RetentionClass
    }
    for _ in range(50):
        slot, retention = rng.randrange(1, 31), rng.choice(list(RetentionClass))
        order[RetentionClass(segments.classes[slot])].remove(slot)
        order[retention].append(slot)
        segments.move(slot, retention)
        assert {retention: list(segments.order(retention)) for retention in RetentionClass} == order
        assert segments.check()


def owned(owners: list[int], floors: dict[int, int]) -> Segments:
    """Slots 1, 2, ... of these owners, released in this order."""
    segments = Segments(len(owners) + 1)
    for slot, owner in enumerate(owners, 1):
        segments.set_owner(slot, owner, is_listed=False)
        segments.add(slot)
    segments.floor_by_owner.update(floors)
    return segments


def test_owners_at_their_floor_are_passed_over() -> None:
    segments = owned([1, 2, 1, 2, 1, 0], {1: 2, 2: 5})
    assert segments.victims(1) == [1]
    assert segments.victims(2) == [1, 6]  # owner 1 is at its floor then, owner 2 was under it
    assert segments.victims(4) == [1, 6, 2, 3]  # nothing else is left: the order alone


def test_others_in_a_higher_segment_go_before_a_floor_is_broken() -> None:
    segments = owned([1, 1, 2], {1: 2})
    segments.move(3, RetentionClass.PREEMPTED)
    assert segments.victims(1) == [3]


def test_the_search_is_bounded_and_then_takes_the_head() -> None:
    others = SEARCH_DEPTH + 1
    assert owned([1] * others + [2], {1: others}).victims(1) == [1]
    assert owned([1] * (others - 2) + [2], {1: others}).victims(1) == [others - 1]


@pytest.mark.parametrize("seed", range(40))
def test_victims_are_distinct_and_enough_under_any_floors(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([5, 40, 300])
    owners = [rng.randrange(4) for _ in range(size)]
    segments = owned(owners, {owner: rng.randrange(1, size) for owner in range(1, 4)})
    for slot in range(1, size + 1):
        if rng.random() < 0.5:
            segments.move(slot, rng.choice(list(RetentionClass)))
    before = segments.snapshot()
    for count in {1, size // 2, size - 1, size, size + 5}:
        victims = segments.victims(count)
        assert len(victims) == len(set(victims)) == min(count, size)
    assert segments.snapshot() == before


def test_the_oldest_beyond_the_protected_share_become_the_newest_seen_once() -> None:
    segments = filled(*[RetentionClass.REUSED] * 4, RetentionClass.ONCE)
    assert segments.demote(0.4, maximum=1) == 1
    assert list(segments) == [5, 1, 2, 3, 4]
    assert segments.counts[RetentionClass.REUSED] == 3
    assert segments.demote(0.4, maximum=9) == 1
    assert segments.demote(0.4, maximum=9) == 0
    assert list(segments) == [5, 1, 2, 3, 4]
    assert segments.check()


def test_counts_that_disagree_are_found() -> None:
    segments = filled(RetentionClass.ONCE, RetentionClass.REUSED)
    segments.counts[RetentionClass.ONCE] = 2
    assert not segments.check()


@pytest.mark.parametrize("seed", [*range(30), *fresh_seeds(5)])
def test_many_slots_at_once_change_the_lists_as_one_after_the_other(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([5, 80, 400])
    one, many = (Segments(size + 1) for _ in range(2))
    listed: list[int] = []
    for _ in range(60):
        others = [slot for slot in range(1, size + 1) if slot not in listed]
        move = rng.randrange(6)
        slots = rng.sample(listed if move < 3 else others, rng.randrange(len(listed if move < 3 else others) + 1))
        if rng.random() < 0.7:  # as tables are: stretches, not single slots
            slots.sort(reverse=rng.random() < 0.7)
        retention, owner = rng.choice(list(RetentionClass)), rng.randrange(6)
        array = np.array(slots, np.intp)
        if move == 0:
            for slot in slots:
                one.remove(slot)
            many.remove_many(SlotIndex(array))
            listed = [slot for slot in listed if slot not in slots]
        elif move == 1:
            for slot in slots:
                one.move(slot, retention)
            many.move_many(SlotIndex(array), retention)
        elif move in (2, 3):
            for slot in slots:
                one.set_owner(slot, owner, is_listed=move == 2)
            many.set_owner_many(SlotIndex(array), owner, SlotIndex(array if move == 2 else array[:0]))
        else:
            for slot in slots:
                if move == 4:
                    one.classes[slot] = many.classes[slot] = rng.choice(list(RetentionClass))
                one.add(slot)
            many.add_many(SlotIndex(array))
            listed += slots
        assert many.snapshot() == one.snapshot(), seed
        assert many.check(), seed
        assert one.check(), seed


@pytest.mark.parametrize("seed", [*range(60), *fresh_seeds(10)])
def test_many_victims_are_those_that_a_search_one_by_one_finds(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([40, 200, 700])
    owners = [rng.choice([0, 1, 1, 2, 3, 4]) for _ in range(size)]
    segments = owned(owners, {owner: rng.randrange(1, size) for owner in range(1, rng.randrange(1, 5))})
    for slot in range(1, size + 1):
        if rng.random() < 0.4:
            segments.move(slot, rng.choice(list(RetentionClass)))
    for count in {0, 1, 31, 32, size // 2, size - 1, size, size + 5}:
        found = segments.many_victims(count).tolist()
        assert found == slow_victims(segments, count), (seed, count)


def slow_victims(segments: Segments, count: int) -> list[int]:
    """The rule in plain steps: pass over owners at their floor, at most so many copies in each segment."""
    chosen: list[int] = []
    left = {
        owner: counted - segments.floor_by_owner.get(owner, 0) for owner, counted in segments.counts_by_owner().items()
    }
    for retention in RetentionClass:
        passed = 0
        for slot in segments.order(retention) if segments.floor_by_owner else ():
            if len(chosen) == count or passed == SEARCH_DEPTH:
                break
            if left[segments.owners[slot]] > 0:
                chosen.append(slot)
            else:
                passed += 1
            left[segments.owners[slot]] -= 1
    first = list(segments)[: 2 * count]
    return chosen + [slot for slot in first if slot not in chosen][: count - len(chosen)]


def test_victims_are_found_in_order_when_many_go_at_once() -> None:
    segments = Segments(20_001)
    order = list(range(1, 20_001))
    random.Random(1).shuffle(order)
    for slot in order:
        segments.classes[slot] = slot % 3
        segments.add(slot)
    assert segments.many_victims(12_000).tolist() == list(segments)[:12_000]
