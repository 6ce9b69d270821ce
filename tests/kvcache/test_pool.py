"""The slots of one tier: one state each, runs, floors, retention classes."""

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.kvcache.snapshots import snapshot_of_pool
from tiercel.kvcache.eviction import RetentionClass
from tiercel.kvcache.pool import SlotPool
from tiercel.kvcache.slot_state import NULL_BLOCK, SlotState
from tiercel.values.errors import InvariantError
from tiercel.values.ids import BlockKey, SlotId


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


def cached(pool: SlotPool, count: int, first_key: int = 0, owner: int = 0) -> list[SlotId]:
    """Return a chain of cached blocks, head first."""
    slots = pool.take_many(count)
    for number, slot in enumerate(slots):
        pool.publish(slot, key(first_key + number))
        pool.copies.set_owner(slot, owner)
    for slot in reversed(slots):
        pool.drop(slot, 0)
    return slots


def state(pool: SlotPool, slot: SlotId) -> SlotState:
    return SlotState(pool.states[slot])


# ---- runs


def count_runs(slots: list[SlotId]) -> int:
    return sum(1 for before, slot in pairwise(slots) if slot != before + 1) + bool(slots)


@pytest.mark.parametrize("seed", range(20))
def test_in_an_empty_pool_every_fresh_table_is_one_run_and_grows_in_place(seed: int) -> None:
    rng = random.Random(seed)
    pool = SlotPool(400)
    tables = [pool.take_many(rng.randrange(1, 20), headroom=8) for _ in range(12)]
    for _ in range(8):
        for table in tables:
            table += pool.take_many(1, near=table[-1])
    assert [count_runs(table) for table in tables] == [1] * 12
    assert pool.mean_run == sum(map(len, tables)) / 12
    pool.check_integrity()


def test_headroom_is_borrowed_when_there_is_no_other_room() -> None:
    pool = SlotPool(12)
    first = pool.take_many(4, headroom=4)
    assert pool.take_many(8) == [*range(first[-1] + 1, 13)]
    assert pool.num_free == 0


def test_a_run_that_ends_early_is_continued_at_the_next_run() -> None:
    pool = SlotPool(12)
    table, wall = pool.take_many(3), pool.take_many(1)
    pool.drop(table.pop(), 0)
    assert pool.take_many(4, near=table[-1]) == [3, 5, 6, 7]
    assert wall == [4]


def test_the_largest_runs_are_taken_when_no_single_one_is_long_enough() -> None:
    pool = SlotPool(20)
    slots = pool.take_many(20)
    for slot in (3, 6, 7, 8, 9, 12, 15, 16):
        pool.drop(slots[slot - 1], 0)
    assert pool.take_many(6) == [6, 7, 8, 9, 15, 16]
    assert sorted(pool.take_many(2)) == [3, 12]


def test_a_run_across_the_end_of_the_last_search_is_found() -> None:
    pool = SlotPool(10)
    for slot in pool.take_many(5):
        pool.drop(slot, 0)
    assert pool.take_many(8) == [*range(1, 9)]


def test_evicted_slots_are_taken_as_runs_whatever_the_eviction_order() -> None:
    pool = SlotPool(8)
    cached(pool, 8)
    assert pool.take_many(8) == [*range(1, 9)]


def test_taking_continues_a_table_with_slots_evicted_for_it() -> None:
    pool = SlotPool(8)
    table = pool.take_many(2)
    cached(pool, 6)
    table += pool.take_many(6, near=table[-1])
    assert table == [*range(1, 9)]


@pytest.mark.parametrize("seed", range(30))
def test_taking_never_fails_while_there_is_scattered_room(seed: int) -> None:
    rng = random.Random(seed)
    pool = SlotPool(200)
    held = pool.take_many(200)
    for slot in rng.sample(held, rng.randrange(1, 200)):
        pool.drop(slot, 0)
        held.remove(slot)
    while pool.num_free:
        near = rng.choice(held) if held and rng.random() < 0.5 else None
        taken = pool.take_many(rng.randrange(1, pool.num_free + 1), near, rng.randrange(0, 9))
        assert len(set(taken)) == len(taken) and not set(taken) & set(held)
        held += taken
        pool.check_integrity()
    assert len(held) == 200
    with pytest.raises(InvariantError, match="exhausted"):
        pool.take()
    pool.check_integrity()


def test_taking_nothing_changes_nothing() -> None:
    pool = SlotPool(4)
    before = snapshot_of_pool(pool)
    assert pool.take_many(0) == pool.take_many(0, near=SlotId(4), headroom=9) == []
    assert snapshot_of_pool(pool) == before


# ---- references


def test_a_double_free_raises_and_changes_nothing() -> None:
    pool = SlotPool(4)
    slot = pool.take()
    pool.drop(slot, 0)
    before = snapshot_of_pool(pool)
    for by_transfer in (False, True):
        with pytest.raises(InvariantError, match="double_free"):
            pool.drop(slot, 0, by_transfer=by_transfer)
    with pytest.raises(InvariantError, match="double_free"):
        pool.drop(NULL_BLOCK, 0)
    assert snapshot_of_pool(pool) == before


def test_tables_and_transfers_cannot_drop_each_others_references() -> None:
    pool = SlotPool(4)
    by_table = pool.take()
    by_transfer = pool.take_many(1, by_transfer=True)[0]
    with pytest.raises(InvariantError, match="double_free"):
        pool.drop(by_table, 0, by_transfer=True)
    with pytest.raises(InvariantError, match="double_free"):
        pool.drop(by_transfer, 0)


def test_an_empty_slot_cannot_be_held() -> None:
    pool = SlotPool(4)
    for slot in (SlotId(1), NULL_BLOCK):
        with pytest.raises(InvariantError, match="hold_empty"):
            pool.hold(slot)
        with pytest.raises(InvariantError, match="keep_empty"):
            pool.copies.set_retention(slot, RetentionClass.WANTED)
        with pytest.raises(InvariantError, match="owner_empty"):
            pool.copies.set_owner(slot, 1)


def test_slots_that_only_transfers_hold_are_coming() -> None:
    pool = SlotPool(4)
    table = pool.take_many(2)
    pool.publish(table[0], key(0))
    pool.hold(table[0], by_transfer=True)
    assert pool.num_coming == 0
    pool.drop(table[0], 1)  # the transfer and a launched step go on
    pool.drop(table[1], 1)
    assert (pool.num_coming, pool.num_deferred, pool.num_owned) == (2, 1, 1)
    pool.drop(table[0], 0, by_transfer=True)
    assert (pool.num_coming, pool.num_deferred) == (2, 2)
    pool.commit(1)
    assert (pool.num_coming, pool.num_free, pool.num_cached) == (0, 3, 1)


def test_a_failed_target_is_discarded() -> None:
    pool = SlotPool(4)
    target, other = pool.take_many(2, by_transfer=True)
    pool.hold(other)
    pool.discard(target)
    assert pool.num_free == 3
    with pytest.raises(InvariantError, match="discard"):
        pool.discard(other)  # a table refers to it too
    pool.drop(other, 0)
    pool.publish(other, key(1))
    with pytest.raises(InvariantError, match="discard"):
        pool.discard(other)  # a good copy
    pool.forget(other)
    pool.discard(other)
    assert pool.num_free == 4 and not pool.slot_by_key
    pool.check_integrity()


def test_a_copy_of_an_earlier_run_is_adopted_only_into_its_free_slot() -> None:
    pool = SlotPool(4)
    assert pool.adopt(SlotId(3), key(3))
    assert not pool.adopt(SlotId(3), key(4))
    assert not pool.adopt(SlotId(2), key(3))
    assert pool.take_at(SlotId(2), by_transfer=True)
    assert not pool.take_at(SlotId(2)) and not pool.take_at(NULL_BLOCK) and not pool.take_at(SlotId(5))
    pool.check_integrity()
    assert (pool.num_cached, pool.num_coming, pool.num_free) == (1, 1, 2)


# ---- copies


def test_a_copy_is_evicted_on_demand_unless_it_is_referenced() -> None:
    pool = SlotPool(4)
    first, second = cached(pool, 2)
    pool.hold(first)
    assert not pool.evict_key(key(0)) and not pool.evict_key(key(7))
    assert pool.evict_key(key(1))
    with pytest.raises(InvariantError, match="evict"):
        pool.evict(first)
    assert state(pool, second) is SlotState.FREE and pool.num_free == 3


def test_the_tail_of_a_chain_goes_before_its_head() -> None:
    pool = SlotPool(6)
    chain = cached(pool, 6)
    assert tuple(pool.copies) == tuple(reversed(chain))
    assert pool.take_many(2) == chain[-2:]


def test_classes_go_in_order_and_a_hit_is_reuse() -> None:
    pool = SlotPool(10, protected_share=1)
    slots = cached(pool, 6)
    for slot, retention in zip(
        slots, (RetentionClass.PREEMPTED, RetentionClass.WANTED, None, RetentionClass.SHADOW, None, None), strict=True
    ):
        if retention is not None:
            pool.copies.set_retention(slot, retention)
    for slot in (slots[2], slots[4]):
        pool.hold(slot, is_reuse=slot == slots[2])
        pool.drop(slot, 0)
    pool.hold(slots[5], by_transfer=True)  # a write-back is no hit
    pool.drop(slots[5], 0, by_transfer=True)
    expected = [slots[3], slots[4], slots[5], slots[2], slots[1], slots[0]]
    assert tuple(pool.copies) == tuple(expected)
    assert [pool.copies.num_retained(retention) for retention in RetentionClass] == [1, 2, 1, 1, 1]
    pool.take_many(10)
    assert [pool.copies.num_retained(retention) for retention in RetentionClass] == [0] * 5
    assert {pool.copies.retention(slot) for slot in slots} == {RetentionClass.ONCE}  # an empty slot keeps no class


def test_a_touched_copy_goes_last_of_its_class() -> None:
    pool = SlotPool(6)
    chain = cached(pool, 3)
    pool.copies.touch(chain[2])
    pool.copies.touch(SlotId(6))
    assert tuple(pool.copies) == (chain[1], chain[0], chain[2])


def test_the_oldest_reused_copies_beyond_their_share_count_as_seen_once() -> None:
    pool = SlotPool(20, protected_share=0.5)
    slots = cached(pool, 10)
    for slot in slots[:8]:
        pool.hold(slot)
        pool.drop(slot, 0)
    assert pool.balance(maximum=2) == 2
    assert pool.copies.num_retained(RetentionClass.REUSED) == 6
    pool.commit(1)
    assert pool.copies.num_retained(RetentionClass.REUSED) == 5
    assert pool.balance() == 0
    assert tuple(pool.copies) == (slots[9], slots[8], *slots[:3], *slots[3:8])
    pool.check_integrity()


# ---- floors


def test_an_owner_keeps_its_floor_while_another_owners_copy_can_go() -> None:
    pool = SlotPool(12)
    mine, theirs = cached(pool, 6, owner=1), cached(pool, 6, first_key=10, owner=2)
    pool.victims.floor_by_owner[1] = 4
    taken = pool.take_many(8)
    assert set(taken) == {*mine[4:], *theirs}
    assert (pool.copies.num_cached_of(1), pool.copies.num_cached_of(2), pool.copies.num_cached_of(9)) == (4, 0, 0)
    assert set(pool.take_many(2)) == set(mine[2:4])  # no other owner's copy is left
    pool.check_integrity()


def test_a_floor_is_spared_for_a_limited_number_of_copies() -> None:
    pool = SlotPool(200)
    mine = cached(pool, 150, owner=1)
    cached(pool, 50, first_key=500, owner=2)
    pool.victims.floor_by_owner[1] = 150
    assert pool.take() == mine[-1]


def test_a_copy_counts_for_its_new_owner() -> None:
    pool = SlotPool(4)
    first, _ = cached(pool, 2, owner=3)
    pool.copies.set_owner(first, 700)
    assert (pool.copies.num_cached_of(3), pool.copies.num_cached_of(700), pool.copies.owner(first)) == (1, 1, 700)
    pool.check_integrity()


# ---- evictions are heard


def test_another_tier_follows_evictions() -> None:
    upper, lower = SlotPool(4), SlotPool(4)
    cached(upper, 4)
    for slot in cached(lower, 4):
        lower.copies.set_retention(slot, RetentionClass.SHADOW)
    upper.on_evict = lambda gone, slot: lower.copies.set_retention(
        lower.slot_by_key[gone], RetentionClass(upper.copies.retention(slot))
    )
    upper.take_many(3)
    upper.evict_key(key(0))
    assert lower.copies.num_retained(RetentionClass.ONCE) == 4
    assert upper.num_cached == 0
    upper.check_integrity()
    lower.check_integrity()


# ---- walks


class Driver:
    """A pool, and the expected references to its slots."""

    def __init__(self, blocks: int, floors: dict[int, int], share: float) -> None:
        self.pool = SlotPool(blocks, protected_share=share)
        self.pool.victims.floor_by_owner.update(floors)
        self.tables: list[SlotId] = []
        self.transfers: list[SlotId] = []
        self.step = 0
        self.next_key = 0

    def of(self, *states: SlotState) -> list[SlotId]:
        return [SlotId(slot) for slot, state in enumerate(self.pool.states) if state in states]

    def take(self, count: int, pick: int, headroom: int, by_transfer: bool) -> None:
        near = self.tables[pick % len(self.tables)] if self.tables and pick % 2 else None
        room = self.pool.num_free + self.pool.num_cached
        if count > room:
            with pytest.raises(InvariantError, match="exhausted"):
                self.pool.take_many(count, near, headroom)
            return
        taken = self.pool.take_many(count, near, headroom, by_transfer=by_transfer)
        assert len(taken) == len(set(taken)) == count
        assert all(self.pool.refs[slot] == 1 for slot in taken)
        assert self.pool.num_free + self.pool.num_cached == room - count
        (self.transfers if by_transfer else self.tables).extend(taken)

    def hold(self, pick: int, by_transfer: bool) -> None:
        slots = [slot for slot in range(self.pool.blocks + 1) if self.pool.key(SlotId(slot)) is not None]
        if slots:
            slot = SlotId(slots[pick % len(slots)])
            self.pool.hold(slot, by_transfer=by_transfer, is_reuse=pick % 3 > 0)
            (self.transfers if by_transfer else self.tables).append(slot)

    def drop(self, pick: int, age: int, by_transfer: bool) -> None:
        held = self.transfers if by_transfer else self.tables
        if held:
            self.pool.drop(held.pop(pick % len(held)), self.step + 1 - age, by_transfer=by_transfer)

    def discard(self, pick: int) -> None:
        once = [slot for slot in self.of(SlotState.OWNED) if self.pool.refs[slot] == 1]
        if once:
            slot = once[pick % len(once)]
            if self.pool.deferred.last_step(slot) > self.pool.deferred.committed:
                return
            if self.pool.key(slot) is not None:
                self.pool.forget(slot)
            self.pool.discard(slot)
            (self.transfers if slot in self.transfers else self.tables).remove(slot)
            assert state(self.pool, slot) is SlotState.FREE

    def evict(self, pick: int) -> None:
        if slots := self.of(SlotState.CACHED):
            slot = slots[pick % len(slots)]
            name = self.pool.key(slot)
            assert name is not None
            if pick % 2:
                self.pool.evict(slot)
            else:
                assert self.pool.evict_key(name)
            assert name not in self.pool.slot_by_key

    def mark(self, pick: int, retention: RetentionClass, owner: int) -> None:
        if slots := self.of(SlotState.CACHED, SlotState.OWNED, SlotState.DEFERRED):
            slot = slots[pick % len(slots)]
            self.pool.copies.set_retention(slot, retention)
            self.pool.copies.set_owner(slot, owner)
            self.pool.copies.touch(slot)
            assert (self.pool.copies.retention(slot), self.pool.copies.owner(slot)) == (retention, owner)

    def publish(self, pick: int, is_new: bool) -> None:
        unnamed = [slot for slot in self.tables if self.pool.key(slot) is None]
        if unnamed:
            slot = unnamed[pick % len(unnamed)]
            self.next_key += is_new
            canonical = self.pool.publish(slot, key(self.next_key))
            assert self.pool.key(canonical) == key(self.next_key)

    def commit(self) -> None:
        self.step += 1
        self.pool.commit(self.step)
        assert not [slot for slot in self.of(SlotState.DEFERRED) if self.pool.deferred.last_step(slot) <= self.step]

    def check(self) -> None:
        pool = self.pool
        pool.check_integrity()
        refs, lent = Counter(self.tables + self.transfers), Counter(self.transfers)
        assert [refs[SlotId(slot)] for slot in range(pool.blocks + 1)] == pool.refs.tolist()
        assert [lent[SlotId(slot)] for slot in range(pool.blocks + 1)] == pool.transfer_refs.tolist()
        coming = len(self.of(SlotState.DEFERRED)) + len(set(self.transfers) - set(self.tables))
        assert pool.num_coming == coming
        assert len(self.of(SlotState.FREE)) == pool.num_free
        assert set(tuple(pool.copies)) == set(self.of(SlotState.CACHED))


@pytest.mark.parametrize("seed", range(60))
def test_random_walk_keeps_the_books(seed: int) -> None:
    rng = random.Random(seed)
    driver = Driver(rng.choice([1, 4, 11, 60]), rng.choice([{}, {1: 2, 3: 5}]), rng.choice([0.0, 0.25, 0.8]))
    for _ in range(120):
        for _ in range(rng.randrange(1, 6)):
            pick, by_transfer = rng.randrange(10**6), rng.random() < 0.3
            move = rng.randrange(8)
            if move < 2:
                driver.take(rng.randrange(0, 1 + driver.pool.blocks // 2), pick, rng.randrange(5), by_transfer)
            elif move < 4:
                driver.drop(pick, rng.randrange(3), by_transfer)
            elif move == 4:
                driver.hold(pick, by_transfer)
            elif move == 5:
                driver.mark(pick, RetentionClass(rng.randrange(5)), rng.randrange(5))
            else:
                (driver.evict, driver.discard)[move - 6](pick)
        driver.check()
        for _ in range(rng.randrange(4)):
            driver.publish(rng.randrange(10**6), rng.random() < 0.8)
        if rng.random() < 0.6:
            driver.commit()
        driver.check()
    for slot in driver.transfers:
        driver.pool.drop(slot, 0, by_transfer=True)
    for slot in driver.tables:
        driver.pool.drop(slot, 0)
    driver.pool.commit(driver.step + 2)
    driver.pool.check_integrity()
    assert driver.pool.num_owned == driver.pool.num_coming == 0


picks = st.integers(0, 999)


class PoolMachine(RuleBasedStateMachine):
    """Any order of moves keeps the books."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(7, {1: 2}, 0.25)

    @rule(count=st.integers(0, 5), pick=picks, headroom=st.integers(0, 3), by_transfer=st.booleans())
    def take(self, count: int, pick: int, headroom: int, by_transfer: bool) -> None:
        self.driver.take(count, pick, headroom, by_transfer)

    @rule(pick=picks, by_transfer=st.booleans())
    def hold(self, pick: int, by_transfer: bool) -> None:
        self.driver.hold(pick, by_transfer)

    @rule(pick=picks, age=st.integers(0, 2), by_transfer=st.booleans())
    def drop(self, pick: int, age: int, by_transfer: bool) -> None:
        self.driver.drop(pick, age, by_transfer)

    @rule(pick=picks)
    def discard(self, pick: int) -> None:
        self.driver.discard(pick)

    @rule(pick=picks)
    def evict(self, pick: int) -> None:
        self.driver.evict(pick)

    @rule(pick=picks, retention=st.sampled_from(RetentionClass), owner=st.integers(0, 2))
    def mark(self, pick: int, retention: RetentionClass, owner: int) -> None:
        self.driver.mark(pick, retention, owner)

    @rule(pick=picks, is_new=st.booleans())
    def publish(self, pick: int, is_new: bool) -> None:
        self.driver.publish(pick, is_new)

    @rule()
    def commit(self) -> None:
        self.driver.commit()

    @invariant()
    def books_agree(self) -> None:
        self.driver.check()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=100, deadline=None)
