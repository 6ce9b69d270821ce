"""Operations on many slots equal the same operations slot by slot: two pools are compared."""

import random

import numpy as np
import pytest

from tests.foreign import foreign_numbers
from tests.kvcache.snapshots import snapshot_of_pool
from tests.seeds import fresh_seeds
from tiercel.kvcache.eviction import RetentionClass
from tiercel.kvcache.free_run import FreeRunSearch
from tiercel.kvcache.pool import SlotPool, SlotState
from tiercel.values.errors import InvariantError
from tiercel.values.ids import BlockKey, SlotId


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


class Pair:
    """Two pools that do the same: `one` slot by slot, `many` with arrays."""

    def __init__(self, blocks: int, floors: dict[int, int]) -> None:
        self.one, self.many = SlotPool(blocks), SlotPool(blocks)
        self.heard: tuple[list[int], list[int]] = ([], [])
        self.freed: tuple[list[int], list[int]] = ([], [])
        self.one.on_evict = lambda _, slot: self.heard[0].append(slot)
        self.many.on_evict = lambda _, slot: self.heard[1].append(slot)
        self.many.on_evict_many = lambda slots: self.heard[1].extend(slots.tolist())
        self.one.on_free = self.freed[0].append
        self.many.on_free = self.freed[1].append
        self.many.on_free_many = lambda slots: self.freed[1].extend(slots.tolist())
        for pool in (self.one, self.many):
            pool.victims.floor_by_owner.update(floors)
        self.tables: list[list[int]] = []
        self.loans: list[list[int]] = []
        self.next_key = 0
        self.step = 0

    def take(self, count: int, near: int | None, by_transfer: bool) -> None:
        if count > self.one.num_free + self.one.num_cached:
            with pytest.raises(InvariantError, match="exhausted"):
                self.many.take_slots(count, by_transfer=by_transfer)
            return
        behind = None if near is None else SlotId(near)
        slots: list[int] = []
        if not self.one.victims.floor_by_owner:  # the victims are evicted one by one
            for slot in tuple(self.one.copies)[: max(0, count - self.one.num_free)]:
                self.one.evict(SlotId(slot))
        slots += self.one.take_many(count, behind, 8, by_transfer=by_transfer)
        assert self.many.take_slots(count, behind, 8, by_transfer=by_transfer).tolist() == slots
        (self.loans if by_transfer else self.tables).append(slots)

    def hold(self, slots: list[int], by_transfer: bool, is_reuse: bool) -> None:
        for slot in slots:
            self.one.hold(SlotId(slot), by_transfer=by_transfer, is_reuse=is_reuse)
        self.many.hold_many(np.array(slots, np.intp), by_transfer=by_transfer, is_reuse=is_reuse)
        (self.loans if by_transfer else self.tables).append(slots)

    def drop(self, slots: list[int], last_step: int, by_transfer: bool) -> None:
        for slot in slots:
            self.one.drop(SlotId(slot), last_step, by_transfer=by_transfer)
        self.many.drop_many(np.array(slots, np.intp), last_step, by_transfer=by_transfer)

    def publish(self, slots: list[int], is_new: bool) -> None:
        keys = [key(self.next_key + number if is_new else number + 1) for number in range(len(slots))]
        self.next_key += len(slots) if is_new else 0
        lost = [slot for slot, name in zip(slots, keys, strict=True) if self.one.publish(SlotId(slot), name) != slot]
        assert self.many.publish_many(np.array(slots, np.intp), keys).tolist() == lost

    def mark(self, slots: list[int], retention: RetentionClass, owner: int) -> None:
        for slot in slots:
            self.one.copies.set_retention(SlotId(slot), retention)
        for slot in slots:
            self.one.copies.set_owner(SlotId(slot), owner)
        self.many.copies.set_retention_many(np.array(slots, np.intp), retention)
        self.many.copies.set_owner_many(np.array(slots, np.intp), owner)

    def commit(self) -> None:
        self.step += 1
        self.one.commit(self.step)
        self.many.commit(self.step)

    def check(self) -> None:
        self.one.check_integrity()
        self.many.check_integrity()
        assert not foreign_numbers(self.many)
        assert snapshot_of_pool(self.many) == snapshot_of_pool(self.one)
        assert self.many.evictions == self.one.evictions
        assert self.many.versions.stamps.tolist() == self.one.versions.stamps.tolist()
        assert self.heard[0] == self.heard[1]
        assert sorted(self.freed[0]) == sorted(self.freed[1])

    def held(self) -> list[int]:
        return [slot for slot in range(1, self.one.blocks + 1) if self.one.states[slot] not in (SlotState.FREE,)]


@pytest.mark.parametrize("seed", [*range(40), *fresh_seeds(10)])
@pytest.mark.sampled(6)
def test_operations_on_many_slots_equal_operations_slot_by_slot(seed: int) -> None:
    rng = random.Random(seed)
    blocks = rng.choice([50, 150, 400])
    pair = Pair(blocks, rng.choice([{}, {1: 20, 3: 60}]))
    for _ in range(120):
        by_transfer, lists = False, pair.tables
        if rng.random() < 0.3:
            by_transfer, lists = True, pair.loans
        named = [slot for slot in range(1, blocks + 1) if pair.one.key(SlotId(slot)) is not None]
        match rng.randrange(7):
            case 0 | 1:
                near = rng.choice(pair.tables)[-1] if pair.tables and rng.random() < 0.5 else None
                pair.take(rng.randrange(1, blocks // 2), near, by_transfer)
            case 2 if named:
                some = rng.sample(named, rng.randrange(1, len(named) + 1))
                pair.hold(some, by_transfer, rng.random() < 0.6)
            case 3 | 4 if lists:
                slots = lists.pop(rng.randrange(len(lists)))
                pair.drop(slots[::-1], max(0, pair.step + rng.randrange(-1, 3)), by_transfer)
            case 5 if pair.tables:
                slots = [slot for slot in rng.choice(pair.tables) if pair.one.key(SlotId(slot)) is None]
                if slots:
                    pair.publish(slots, rng.random() < 0.8)
                held = pair.held()
                marked = rng.sample(held, rng.randrange(len(held) + 1))
                pair.mark(marked, rng.choice(list(RetentionClass)), rng.randrange(5))
            case _:
                pair.commit()
        try:
            pair.check()
        except (AssertionError, InvariantError):
            print(f"failing seed {seed}")
            raise


@pytest.mark.parametrize("seed", range(30))
def test_taking_all_slots_returns_them_in_the_order_of_runs(seed: int) -> None:
    rng = random.Random(seed)
    states = bytearray(rng.choice([0, 0, 1]) for _ in range(200))
    states[0] = 4
    free = [slot for slot, state in enumerate(states) if not state]
    near = rng.choice([None, *range(1, 199)])
    found = FreeRunSearch(bytearray(states), 1).take_these(free[::-1], near)
    slots = FreeRunSearch(bytearray(states), 1).take_all(np.array(free[::-1], np.intp), near)
    assert slots.tolist() == [slot for first, length in found for slot in range(first, first + length)]


def test_the_largest_free_runs_are_found_by_one_look() -> None:
    pool = SlotPool(6000)
    slots = pool.take_slots(6000)
    kept = slots[::3] if len(slots) else slots
    pool.drop_many(slots[~np.isin(slots, kept)], 0)
    pool.drop_many(kept[:700], 0)  # the first 2100 slots are one run
    taken = pool.take_slots(3000)
    assert len(set(taken.tolist())) == 3000
    assert taken[:2100].tolist() == list(range(1, 2101))
    pool.check_integrity()


def test_keys_of_slots_that_lost_their_names_at_once_are_not_found_and_leave_the_map_later() -> None:
    pool = SlotPool(3000)
    slots = pool.take_slots(3000)
    pool.publish_many(slots, [key(number) for number in range(3000)])
    pool.drop_many(slots, 0)
    pool.take_slots(2900)
    assert len(pool.slot_by_key) == 100
    assert sum(key(number) in pool.slot_by_key for number in range(3000)) == 100
    assert len(dict(pool.slot_by_key)) == 100
    again = SlotId(next(slot for slot in range(1, 3001) if pool.key(SlotId(slot)) is None))
    gone = next(number for number in range(3000) if key(number) not in pool.slot_by_key)
    assert pool.publish(again, key(gone)) == again
    for step in range(1, 6):
        pool.commit(step)
        pool.check_integrity()
    assert pool.slot_by_key[key(gone)] == again
    assert len(pool.slot_by_key) == 101
