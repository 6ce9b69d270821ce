"""The copies of a tier in eviction order, each with its retention class and its owner."""

import enum
from array import array
from collections.abc import Iterator
from itertools import islice

import numpy as np
import numpy.typing as npt

from tiercel.kvcache.slot_index import NO_SLOTS, SlotIndex, Slots, as_index, as_slots, count_each, view
from tiercel.kvcache.slot_state import SlotState
from tiercel.values.errors import InvariantError


class RetentionClass(enum.IntEnum):
    """The purpose that a copy is kept for, in the order of eviction."""

    SHADOW = 0  # a higher tier has the same block
    ONCE = 1  # seen once
    REUSED = 2  # hit at least once
    WANTED = 3  # prefetched, or needed by a request that waits
    PREEMPTED = 4  # last copy of a preempted sequence


NUM_CLASSES = len(RetentionClass)
_FREE, _CACHED, _NULL = int(SlotState.FREE), int(SlotState.CACHED), int(SlotState.NULL)
_ONCE, _REUSED = int(RetentionClass.ONCE), int(RetentionClass.REUSED)
_MIN_SORTED = 4096  # for more victims, sorting the ticks may be faster than following the links
_CLASS_SHIFT = 56  # ticks stay below 2 ** 56


class CopyBook:
    """Retention class and owner of every slot, and the unreferenced copies, one list for each retention class.

    A list is in the order of the last release. All lists share two arrays of links, with one sentinel for each list
    behind the slots: a slot leaves from the middle in O(1), and no object exists per slot. A tick says when a slot was
    listed, so that the order of a list is the order of its ticks: with it many slots leave at once, and many victims
    are found without following every link.

    The pool lists and unlists slots when their state changes; it alone calls `add`, `remove`, `reset` and their like.
    """

    def __init__(self, states: npt.NDArray[np.uint8]) -> None:
        """`states` is the pool's view of its slots' states, which this book reads."""
        slots = len(states)
        self.slots = slots
        self.classes = bytearray([_ONCE]) * slots
        self.owners = array("H", bytes(2 * slots))
        self.count = 0  # listed copies
        self._states = states
        self._counts = [0] * NUM_CLASSES
        self._count_by_owner = array("i", [0])
        self._next = array("i", bytes(4 * slots))
        self._next.extend(range(slots, slots + NUM_CLASSES))
        self._previous = array("i", self._next)
        self._ticks = array("q", bytes(8 * slots))  # 0: not listed
        self._tick = 0
        self.all_classes, self.all_owners, self._all_ticks = view(self.classes), view(self.owners), view(self._ticks)
        self._all_next, self._all_previous = view(self._next), view(self._previous)
        self._marked = np.zeros(slots + NUM_CLASSES, bool)  # all False between two calls

    # ---- facts

    def order(self, retention: int) -> Iterator[int]:
        """Yield the listed copies of one class, the next victim first."""
        following, end = self._next, self.slots + retention
        slot = following[end]
        while slot != end:
            yield slot
            slot = following[slot]

    def __iter__(self) -> Iterator[int]:
        """Yield the listed copies of all classes, the next victim first; floors are not considered."""
        for retention in range(NUM_CLASSES):
            yield from self.order(retention)

    def first(self, count: int) -> Slots:
        """Return the first `count` copies in eviction order; floors are not considered."""
        parts: list[Slots] = []
        for retention in range(NUM_CLASSES):
            if count <= 0:
                break
            parts.append(self.first_of(retention, count))
            count -= len(parts[-1])
        return np.concatenate(parts) if parts else NO_SLOTS

    def first_of(self, retention: int, count: int) -> Slots:
        """Return the first `count` copies of one class."""
        count = min(count, self._counts[retention])
        if count > _MIN_SORTED and 8 * count > self.slots:
            found = np.flatnonzero((self.all_classes == retention) & (self._all_ticks > 0))
            # Tables were dropped in runs: the ticks are nearly sorted, which a stable sort makes use of.
            return found[np.argsort(SlotIndex(found).read(self._all_ticks), kind="stable")[:count]]
        return as_slots(list(islice(self.order(retention), count)))

    def retention(self, slot: int) -> RetentionClass:
        """Return the class in which a copy is or will be kept."""
        return RetentionClass(self.classes[slot])

    def are_retained(self, slots: Slots | SlotIndex, retention: RetentionClass) -> npt.NDArray[np.bool_]:
        """Return for each slot whether its copy is or will be kept in this class."""
        return as_index(slots).read(self.all_classes) == retention

    def num_retained(self, retention: RetentionClass) -> int:
        """Return the number of cached copies of a class."""
        return self._counts[retention]

    def owner(self, slot: int) -> int:
        """Return the owner of a copy; 0: none."""
        return self.owners[slot]

    def owners_of(self, slots: Slots | SlotIndex) -> Slots:
        """Return the owner of each slot's copy; 0: none."""
        return as_index(slots).read(self.all_owners)

    def num_cached_of(self, owner: int) -> int:
        """Return the number of cached copies of an owner."""
        return self._count_by_owner[owner] if owner < len(self._count_by_owner) else 0

    def nums_cached_of(self, owners: Slots) -> Slots:
        """Return the number of cached copies of each of these owners."""
        counts = np.array(self._count_by_owner, np.intp)
        return np.append(counts, 0)[np.minimum(owners, len(counts))]

    def counts_by_owner(self) -> dict[int, int]:
        """Return the number of cached copies of every owner that has any."""
        return {owner: count for owner, count in enumerate(self._count_by_owner) if count}

    # ---- retention classes and owners

    def set_retention(self, slot: int, retention: RetentionClass) -> None:
        """Keep a copy in another class: at its recent end, now or when the copy becomes unreferenced.

        Errors: InvariantError for an empty slot.
        """
        if self.classes[slot] == retention:
            return
        state = self._states[slot]
        if state == _CACHED:
            self._move(slot, retention)
        elif state in (_FREE, _NULL):
            raise InvariantError("pool.keep_empty", slot=slot)
        else:
            self.classes[slot] = retention

    def set_retention_many(self, slots: Slots | SlotIndex, retention: RetentionClass) -> None:
        """Keep copies in another class, in this order. Errors: as `set_retention`; nothing is changed then."""
        index = as_index(slots)
        index = index.filter(index.read(self.all_classes) != retention)
        states = index.read(self._states)
        if ((states == _FREE) | (states == _NULL)).any():
            raise InvariantError("pool.keep_empty", slots=index.slots[:8].tolist())
        cached = index.filter(states == _CACHED)
        self.remove_many(cached)
        index.write(self.all_classes, retention)
        self.add_many(cached)

    def touch(self, slot: int) -> None:
        """Make a cached copy the last of its class to be evicted, as if it were released now."""
        if self._states[slot] == _CACHED:
            self._move(slot, self.classes[slot])

    def set_owner(self, slot: int, owner: int) -> None:
        """Set the owner of a copy; a slot that becomes free has none (0). Errors: InvariantError for an empty slot."""
        if self.owners[slot] == owner:
            return
        state = self._states[slot]
        if state in (_FREE, _NULL):
            raise InvariantError("pool.owner_empty", slot=slot)
        counts = self._counters_up_to(owner)
        if state == _CACHED:
            counts[self.owners[slot]] -= 1
            counts[owner] += 1
        self.owners[slot] = owner

    def set_owner_many(self, slots: Slots | SlotIndex, owner: int) -> None:
        """Set the owner of many copies, as `set_owner`. Errors: as there; nothing is changed then."""
        index = as_index(slots)
        states = index.read(self._states)
        if ((states == _FREE) | (states == _NULL)).any():
            raise InvariantError("pool.owner_empty", slots=index.slots[:8].tolist())
        listed = index.filter(states == _CACHED)
        self._counters_up_to(owner)
        self._count_owners(listed, -1)
        index.write(self.all_owners, owner)
        self._count_owners(listed, 1)

    def demote(self, share: float, maximum: int) -> int:
        """While more than `share` of all copies are REUSED, move the oldest of them to ONCE. Return how many moved."""
        limit = int(share * self.count)
        moved = min(self._counts[_REUSED] - limit, maximum)
        for _ in range(moved):
            self._move(self._next[self.slots + _REUSED], _ONCE)
        return max(moved, 0)

    # ---- for the pool: one slot

    def add(self, slot: int) -> None:
        """List a copy that became unreferenced, as the last of its class to be evicted."""
        end = self.slots + self.classes[slot]
        last = self._previous[end]
        self._next[last] = self._previous[end] = slot
        self._previous[slot] = last
        self._next[slot] = end
        self._tick += 1
        self._ticks[slot] = self._tick
        self.count += 1
        self._counts[self.classes[slot]] += 1
        self._count_by_owner[self.owners[slot]] += 1

    def remove(self, slot: int) -> None:
        """Unlist a copy that is referenced again, or evicted."""
        before, behind = self._previous[slot], self._next[slot]
        self._next[before] = behind
        self._previous[behind] = before
        self._ticks[slot] = 0
        self.count -= 1
        self._counts[self.classes[slot]] -= 1
        self._count_by_owner[self.owners[slot]] -= 1

    def reset(self, slot: int) -> None:
        """Forget class and owner of an unlisted slot that becomes empty."""
        self.classes[slot], self.owners[slot] = _ONCE, 0

    def mark_reused(self, slot: int) -> None:
        """Note that an unlisted copy has been hit."""
        if self.classes[slot] == _ONCE:
            self.classes[slot] = _REUSED

    # ---- for the pool: many slots at once, with the same effect as one after the other

    def add_many(self, index: SlotIndex) -> None:
        """List copies that became unreferenced, in this order."""
        slots = index.slots
        classes = index.read(self.all_classes)
        index.write(self._all_ticks, np.arange(self._tick + 1, self._tick + 1 + len(slots)))
        self._tick += len(slots)
        for retention, count in count_each(classes):
            part = index if count == len(slots) else SlotIndex(slots[classes == retention])
            end = self.slots + retention
            last = self._previous[end]
            part.write(self._all_next, np.append(part.slots[1:], end))
            part.write(self._all_previous, np.append(last, part.slots[:-1]))
            self._next[last], self._previous[end] = int(part.slots[0]), int(part.slots[-1])
            self._counts[retention] += count
        self.count += len(slots)
        self._count_owners(index, 1)

    def remove_many(self, index: SlotIndex) -> None:
        """Unlist copies that are referenced again, or evicted.

        The removed slots are stretches of the lists. The first slots of the stretches and their last ones, both in
        the order of the lists, belong together in pairs.
        """
        marked, following, previous = self._marked, self._all_next, self._all_previous
        slots = index.slots
        index.write(marked, True)
        firsts = self._in_list_order(slots[~marked[index.read(previous)]])
        lasts = self._in_list_order(slots[~marked[index.read(following)]])
        index.write(marked, False)
        before, behind = previous[firsts], following[lasts]
        following[before] = behind
        previous[behind] = before
        index.write(self._all_ticks, 0)
        self.count -= len(slots)
        for retention, count in count_each(index.read(self.all_classes)):
            self._counts[retention] -= count
        self._count_owners(index, -1)

    def reset_many(self, index: SlotIndex) -> None:
        """Forget class and owner of unlisted slots that become empty."""
        index.write(self.all_classes, _ONCE)
        index.write(self.all_owners, 0)

    def mark_reused_many(self, index: SlotIndex) -> None:
        """Note that unlisted copies have been hit."""
        classes = index.read(self.all_classes)
        index.write(self.all_classes, np.where(classes == _ONCE, _REUSED, classes))

    # ---- inside

    def _move(self, slot: int, retention: int) -> None:
        """Move a listed slot to the recent end of a class."""
        self.remove(slot)
        self.classes[slot] = retention
        self.add(slot)

    def _in_list_order(self, slots: Slots) -> Slots:
        if len(slots) < 2:
            return slots
        place = self._all_ticks[slots] + (self.all_classes[slots].astype(np.int64) << _CLASS_SHIFT)
        return slots[np.argsort(place)]

    def _count_owners(self, index: SlotIndex, change: int) -> None:
        for owner, count in count_each(index.read(self.all_owners)):
            self._count_by_owner[owner] += change * count

    def _counters_up_to(self, owner: int) -> "array[int]":
        """Return the counters of the owners, with one for this owner."""
        counts = self._count_by_owner
        if owner >= len(counts):
            counts.extend(array("i", bytes(4 * (owner + 1 - len(counts)))))
        return counts

    # ---- checks

    def check(self) -> None:
        """Check that the counters agree with the lists, and the links with each other. Errors: InvariantError."""
        by_owner: dict[int, int] = {}
        for retention in RetentionClass:
            before, listed = self.slots + retention, 0
            for slot in self.order(retention):
                is_right = self.classes[slot] == retention and self._previous[slot] == before and listed <= self.slots
                is_later = before >= self.slots or self._ticks[before] < self._ticks[slot]
                if not (is_right and is_later and self._ticks[slot]):
                    raise InvariantError("pool.segments", slot=slot, counts=tuple(self._counts), count=self.count)
                before, listed = slot, listed + 1
                by_owner[self.owners[slot]] = by_owner.get(self.owners[slot], 0) + 1
            if listed != self._counts[retention] or self._previous[self.slots + retention] != before:
                raise InvariantError("pool.segments", counts=tuple(self._counts), count=self.count)
        num_ticks = int(np.count_nonzero(self._all_ticks))
        if not sum(self._counts) == self.count == num_ticks or by_owner != self.counts_by_owner():
            raise InvariantError("pool.segments", counts=tuple(self._counts), count=self.count)
