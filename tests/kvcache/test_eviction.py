"""The copies of a tier alone: their order, the search that spares owners, the protected share."""

import random

import numpy as np
import pytest

from tests.kvcache.snapshots import snapshot_of_copies
from tests.seeds import fresh_seeds
from tiercel.kvcache.eviction import CopyBook, RetentionClass
from tiercel.kvcache.slot_index import SlotIndex
from tiercel.kvcache.slot_state import SlotState
from tiercel.kvcache.victim import SEARCH_DEPTH, VictimSearch
from tiercel.values.errors import InvariantError


class Copies(CopyBook):
    """A book without a pool, which keeps the states of its slots itself."""

    def __init__(self, size: int) -> None:
        self.states = np.full(size + 1, SlotState.OWNED, np.uint8)
        super().__init__(self.states)

    def cache(self, slots: list[int]) -> None:
        """Release slots one by one."""
        for slot in slots:
            self.states[slot] = SlotState.CACHED
            self.add(slot)

    def unlist(self, slots: list[int]) -> None:
        for slot in slots:
            self.remove(slot)
            self.states[slot] = SlotState.OWNED


def filled(*classes: RetentionClass) -> Copies:
    """Slots 1, 2, ... released in this order."""
    copies = Copies(len(classes))
    for slot, retention in enumerate(classes, 1):
        copies.set_retention(slot, retention)
    copies.cache([*range(1, len(classes) + 1)])
    return copies


def test_classes_go_in_order_and_in_each_the_oldest_first() -> None:
    copies = filled(
        RetentionClass.WANTED,
        RetentionClass.ONCE,
        RetentionClass.SHADOW,
        RetentionClass.ONCE,
        RetentionClass.REUSED,
        RetentionClass.PREEMPTED,
        RetentionClass.SHADOW,
    )
    assert list(copies) == [3, 7, 2, 4, 5, 1, 6]
    search = VictimSearch(copies)
    assert search.choose(3) == [3, 7, 2]
    assert search.choose(99) == list(copies)
    assert search.choose(0) == []


def test_a_removed_slot_is_added_again_as_the_newest() -> None:
    copies = filled(*[RetentionClass.ONCE] * 5)
    copies.unlist([3, 2, 5])
    assert list(copies) == [1, 4]
    copies.cache([2])
    assert list(copies) == [1, 4, 2]
    copies.check()


@pytest.mark.parametrize("seed", range(20))
def test_a_copy_that_changes_its_class_is_the_newest_there(seed: int) -> None:
    rng = random.Random(seed)
    classes = [rng.choice(list(RetentionClass)) for _ in range(30)]
    copies = filled(*classes)
    order = {
        retention: [slot for slot, kept in enumerate(classes, 1) if kept is retention] for retention in RetentionClass
    }
    for _ in range(50):
        slot, retention = rng.randrange(1, 31), rng.choice(list(RetentionClass))
        if copies.retention(slot) is retention:
            continue
        order[copies.retention(slot)].remove(slot)
        order[retention].append(slot)
        copies.set_retention(slot, retention)
        assert {retention: list(copies.order(retention)) for retention in RetentionClass} == order
        copies.check()


def owned(owners: list[int], floors: dict[int, int]) -> VictimSearch:
    """A search over slots 1, 2, ... of these owners, released in this order."""
    copies = Copies(len(owners))
    for slot, owner in enumerate(owners, 1):
        copies.set_owner(slot, owner)
    copies.cache([*range(1, len(owners) + 1)])
    search = VictimSearch(copies)
    for owner, blocks in floors.items():
        search.set_floor(owner, blocks)
    return search


def test_owners_at_their_floor_are_passed_over() -> None:
    search = owned([1, 2, 1, 2, 1, 0], {1: 2, 2: 5})
    assert search.choose(1) == [1]
    assert search.choose(2) == [1, 6], "owner 1 is at its floor then, owner 2 was under it"
    assert search.choose(4) == [1, 6, 2, 3], "nothing else is left: the order alone decides"


def test_other_owners_copies_of_a_higher_class_go_before_a_floor_is_broken() -> None:
    search = owned([1, 1, 2], {1: 2})
    search.copies.set_retention(3, RetentionClass.PREEMPTED)
    assert search.choose(1) == [3]


def test_the_search_is_limited_and_falls_back_to_the_first_copy() -> None:
    others = SEARCH_DEPTH + 1
    assert owned([1] * others + [2], {1: others}).choose(1) == [1]
    assert owned([1] * (others - 2) + [2], {1: others}).choose(1) == [others - 1]


def mix(rng: random.Random, search: VictimSearch, size: int, share: float) -> None:
    """Put some copies into other classes."""
    for slot in range(1, size + 1):
        if rng.random() < share:
            search.copies.set_retention(slot, rng.choice(list(RetentionClass)))


@pytest.mark.parametrize("seed", range(40))
def test_victims_are_distinct_and_enough_under_any_floors(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([5, 40, 300])
    owners = [rng.randrange(4) for _ in range(size)]
    search = owned(owners, {owner: rng.randrange(1, size) for owner in range(1, 4)})
    mix(rng, search, size, 0.5)
    before = snapshot_of_copies(search.copies)
    for count in {1, size // 2, size - 1, size, size + 5}:
        victims = search.choose(count)
        assert len(victims) == len(set(victims)) == min(count, size)
    assert snapshot_of_copies(search.copies) == before


def test_the_oldest_copies_beyond_the_protected_share_become_the_newest_of_once() -> None:
    copies = filled(*[RetentionClass.REUSED] * 4, RetentionClass.ONCE)
    assert copies.demote(0.4, maximum=1) == 1
    assert list(copies) == [5, 1, 2, 3, 4]
    assert copies.num_retained(RetentionClass.REUSED) == 3
    assert copies.demote(0.4, maximum=9) == 1
    assert copies.demote(0.4, maximum=9) == 0
    assert list(copies) == [5, 1, 2, 3, 4]
    copies.check()


def test_links_that_disagree_are_found() -> None:
    copies = filled(RetentionClass.ONCE, RetentionClass.REUSED)
    copies.classes[2] = RetentionClass.WANTED
    with pytest.raises(InvariantError):
        copies.check()


@pytest.mark.parametrize("seed", [*range(30), *fresh_seeds(5)])
def test_many_slots_at_once_change_the_lists_like_one_slot_after_another(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([5, 80, 400])
    one, many = (Copies(size) for _ in range(2))
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
            one.unlist(slots)
            many.remove_many(SlotIndex(array))
            many.states[array] = SlotState.OWNED
            listed = [slot for slot in listed if slot not in slots]
        elif move == 1:
            for slot in slots:
                one.set_retention(slot, retention)
            many.set_retention_many(array, retention)
        elif move in (2, 3):
            for slot in slots:
                one.set_owner(slot, owner)
            many.set_owner_many(array, owner)
        else:
            for slot in slots if move == 4 else ():
                retention = rng.choice(list(RetentionClass))
                one.set_retention(slot, retention)
                many.set_retention(slot, retention)
            one.cache(slots)
            many.states[array] = SlotState.CACHED
            many.add_many(SlotIndex(array))
            listed += slots
        assert snapshot_of_copies(many) == snapshot_of_copies(one), seed
        many.check()
        one.check()


@pytest.mark.parametrize("seed", [*range(60), *fresh_seeds(10)])
def test_many_victims_are_the_same_as_those_of_a_search_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([40, 200, 700])
    owners = [rng.choice([0, 1, 1, 2, 3, 4]) for _ in range(size)]
    search = owned(owners, {owner: rng.randrange(1, size) for owner in range(1, rng.randrange(1, 5))})
    mix(rng, search, size, 0.4)
    for count in {0, 1, 31, 32, size // 2, size - 1, size, size + 5}:
        found = search.choose_many(count).tolist()
        assert found == slow_victims(search, count), (seed, count)


def slow_victims(search: VictimSearch, count: int) -> list[int]:
    """The rule in plain steps: pass over owners at their floor, up to `SEARCH_DEPTH` copies of each class."""
    copies = search.copies
    chosen: list[int] = []
    left = {owner: counted - search.floor_by_owner.get(owner, 0) for owner, counted in copies.counts_by_owner().items()}
    for retention in RetentionClass:
        passed = 0
        for slot in copies.order(retention) if search.floor_by_owner else ():
            if len(chosen) == count or passed == SEARCH_DEPTH:
                break
            if left[copies.owners[slot]] > 0:
                chosen.append(slot)
            else:
                passed += 1
            left[copies.owners[slot]] -= 1
    first = list(copies)[: 2 * count]
    return chosen + [slot for slot in first if slot not in chosen][: count - len(chosen)]


def test_many_victims_come_in_eviction_order() -> None:
    copies = Copies(20_000)
    order = list(range(1, 20_001))
    random.Random(1).shuffle(order)
    for slot in order:
        copies.set_retention(slot, RetentionClass(slot % 3))
    copies.cache(order)
    assert VictimSearch(copies).choose_many(12_000).tolist() == list(copies)[:12_000]
