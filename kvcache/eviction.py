"""Which unreferenced copy goes first when room is needed."""

import enum
from array import array
from collections.abc import Iterator
from itertools import islice

import numpy as np

from tiercel.kvcache.slot_index import MIN_NUMPY_SLOTS, NO_SLOTS, SlotIndex, Slots, as_slots, count_each, view

SEARCH_DEPTH = 64
"""Copies of one segment that a search looks at to spare the owners at their floor."""


class RetentionClass(enum.IntEnum):
    """What a copy is kept for, in the order of eviction."""

    SHADOW = 0  # a higher tier has the same block
    ONCE = 1  # seen once
    REUSED = 2  # hit at least once
    WANTED = 3  # prefetched, or needed by a request that waits
    PREEMPTED = 4  # last copy of a preempted sequence


_SEGMENTS = len(RetentionClass)
_ONCE, _REUSED = int(RetentionClass.ONCE), int(RetentionClass.REUSED)
_MANY = 4096  # victims from which on sorting ticks may beat following links
_CLASS_SHIFT = 56  # ticks stay below 2 ** 56


class Segments:
    """The unreferenced copies of a tier, a list for each `Keep`, in the order of their last release.

    All lists share two arrays, with one sentinel each behind the slots: a slot leaves from the middle in O(1) and no
    object exists per slot. What a slot is kept for and whose it is are known for every slot and count while it is
    listed. A tick says when a slot was listed, so that the order inside a list is the order of ticks: that is how many
    slots leave at once, and how many victims are found without following every link.
    """

    def __init__(self, slots: int) -> None:
        self.classes = bytearray([_ONCE]) * slots
        self.owners = array("H", bytes(2 * slots))
        self.floor_by_owner: dict[int, int] = {}
        self.count = 0
        self.counts = [0] * _SEGMENTS
        self._slots = slots
        self._count_by_owner = array("i", [0])
        self._next = array("i", bytes(4 * slots))
        self._next.extend(range(slots, slots + _SEGMENTS))
        self._previous = array("i", self._next)
        self._ticks = array("q", bytes(8 * slots))  # 0: not listed
        self._tick = 0
        self.all_classes, self.all_owners, self._all_ticks = view(self.classes), view(self.owners), view(self._ticks)
        self._all_next, self._all_previous = view(self._next), view(self._previous)
        self._marked = np.zeros(slots + _SEGMENTS, bool)  # all False between two calls

    def order(self, retention: int) -> Iterator[int]:
        """Slots of one segment, the first to go first."""
        following, end = self._next, self._slots + retention
        slot = following[end]
        while slot != end:
            yield slot
            slot = following[slot]

    def __iter__(self) -> Iterator[int]:
        """Slots of all segments, first victim first."""
        for retention in RetentionClass:
            yield from self.order(retention)

    def count_of(self, owner: int) -> int:
        """Listed copies of an owner."""
        return self._count_by_owner[owner] if owner < len(self._count_by_owner) else 0

    def owner_counts(self) -> Slots:
        """Listed copies by owner."""
        return np.array(self._count_by_owner, np.intp)

    def counts_by_owner(self) -> dict[int, int]:
        """Listed copies of every owner that has any."""
        return {owner: count for owner, count in enumerate(self._count_by_owner) if count}

    # ---- lists

    def add(self, slot: int) -> None:
        """A copy became unreferenced: it is the last of its segment to go."""
        end = self._slots + self.classes[slot]
        last = self._previous[end]
        self._next[last] = self._previous[end] = slot
        self._previous[slot] = last
        self._next[slot] = end
        self._tick += 1
        self._ticks[slot] = self._tick
        self.count += 1
        self.counts[self.classes[slot]] += 1
        self._count_by_owner[self.owners[slot]] += 1

    def remove(self, slot: int) -> None:
        """A copy is referenced again, or evicted."""
        before, behind = self._previous[slot], self._next[slot]
        self._next[before] = behind
        self._previous[behind] = before
        self._ticks[slot] = 0
        self.count -= 1
        self.counts[self.classes[slot]] -= 1
        self._count_by_owner[self.owners[slot]] -= 1

    def move(self, slot: int, retention: int) -> None:
        """Put a listed slot to the recent end of a segment."""
        self.remove(slot)
        self.classes[slot] = retention
        self.add(slot)

    def reset(self, slot: int) -> None:
        """An unlisted slot is nobody's and seen by nobody."""
        self.classes[slot], self.owners[slot] = _ONCE, 0

    # ---- many at once: the same as one after the other

    def add_many(self, index: SlotIndex) -> None:
        """List copies that became unreferenced, in this order."""
        slots = index.slots
        classes = index.read(self.all_classes)
        index.write(self._all_ticks, np.arange(self._tick + 1, self._tick + 1 + len(slots)))
        self._tick += len(slots)
        for retention, count in count_each(classes):
            part = index if count == len(slots) else SlotIndex(slots[classes == retention])
            end = self._slots + retention
            last = self._previous[end]
            part.write(self._all_next, np.append(part.slots[1:], end))
            part.write(self._all_previous, np.append(last, part.slots[:-1]))
            self._next[last], self._previous[end] = int(part.slots[0]), int(part.slots[-1])
            self.counts[retention] += count
        self.count += len(slots)
        self._count_owners(index, 1)

    def remove_many(self, index: SlotIndex) -> None:
        """Take copies off their lists: they are referenced again, or evicted.

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
            self.counts[retention] -= count
        self._count_owners(index, -1)

    def move_many(self, index: SlotIndex, retention: int) -> None:
        """Put listed slots to the recent end of a segment, in this order."""
        self.remove_many(index)
        index.write(self.all_classes, retention)
        self.add_many(index)

    def reuse_many(self, index: SlotIndex) -> None:
        """Unlisted copies that were seen once have been hit."""
        classes = index.read(self.all_classes)
        index.write(self.all_classes, np.where(classes == _ONCE, _REUSED, classes))

    def reset_many(self, index: SlotIndex) -> None:
        """Unlisted slots are nobody's and seen by nobody."""
        index.write(self.all_classes, _ONCE)
        index.write(self.all_owners, 0)

    def set_owner_many(self, index: SlotIndex, owner: int, listed: SlotIndex) -> None:
        """Say whose copies these are; `listed` are those among them that are on a list."""
        self._know(owner)
        self._count_owners(listed, -1)
        index.write(self.all_owners, owner)
        self._count_owners(listed, 1)

    def _in_list_order(self, slots: Slots) -> Slots:
        if len(slots) < 2:
            return slots
        place = self._all_ticks[slots] + (self.all_classes[slots].astype(np.int64) << _CLASS_SHIFT)
        return slots[np.argsort(place)]

    def _count_owners(self, index: SlotIndex, change: int) -> None:
        for owner, count in count_each(index.read(self.all_owners)):
            self._count_by_owner[owner] += change * count

    def set_owner(self, slot: int, owner: int, *, is_listed: bool) -> None:
        """Say whose copy it is."""
        counts = self._know(owner)
        if is_listed:
            counts[self.owners[slot]] -= 1
            counts[owner] += 1
        self.owners[slot] = owner

    def _know(self, owner: int) -> "array[int]":
        """Have a counter for the owner. Returns the counters."""
        counts = self._count_by_owner
        if owner >= len(counts):
            counts.extend(array("i", bytes(4 * (owner + 1 - len(counts)))))
        return counts

    # ---- choice

    def victims(self, count: int) -> list[int]:
        """The next `count` copies to go, at most all.

        The first non-empty segment goes first, and in it the least recently released: of a chain, whose table was
        dropped from its end, the tail. Owners at or under their floor are passed over while the search finds anybody
        else's; past that the order alone decides.
        Cost: O(count + SEARCH_DEPTH).
        """
        if count >= MIN_NUMPY_SLOTS:
            return self.many_victims(count).tolist()
        if self.floor_by_owner:
            return self._victims_above_floor(count)
        chosen: list[int] = []
        following, slots = self._next, self._slots
        for end in range(slots, slots + _SEGMENTS):
            slot = following[end]
            while slot != end:
                if len(chosen) == count:
                    return chosen
                chosen.append(slot)
                slot = following[slot]
        return chosen

    def _victims_above_floor(self, count: int) -> list[int]:
        chosen: list[int] = []
        following, owners, slots = self._next, self.owners, self._slots
        spare: dict[int, int] = {}
        spared: set[int] = set()
        for end in range(slots, slots + _SEGMENTS):
            slot, depth = following[end], SEARCH_DEPTH
            while slot != end and depth and len(chosen) < count:
                owner = owners[slot]
                if owner in spared:
                    depth -= 1
                    slot = following[slot]
                    continue
                left = spare.get(owner)
                if left is None:
                    left = self._count_by_owner[owner] - self.floor_by_owner.get(owner, 0)
                spare[owner] = left - 1
                if left > 0:
                    chosen.append(slot)
                    slot = following[slot]
                else:
                    spared.add(owner)
            if len(chosen) == count:
                return chosen
        known = set(chosen)
        return chosen + [slot for slot in self._some(count) if slot not in known][: count - len(chosen)]

    def _some(self, count: int) -> list[int]:
        """The first of all in order, so many that `count` of them were not chosen yet."""
        return list(islice(self, 2 * count))

    def many_victims(self, count: int) -> Slots:
        """The same choice as `victims`, for many. Cost: as there, at a fraction of the time for each."""
        if not self.floor_by_owner:
            return self._first(count)
        chosen = NO_SLOTS
        seen: dict[int, int] = {}  # copies looked at, by owner
        for retention in range(_SEGMENTS):
            wanted = count - len(chosen)
            if not wanted:
                return chosen
            found = self._first_of(retention, wanted + SEARCH_DEPTH)
            is_spare = self._are_spare(found, seen)
            # The search ends with the last copy that is wanted, or with the last one that it may pass over.
            taken, passed = np.cumsum(is_spare), np.cumsum(~is_spare)
            end = int(np.searchsorted(np.maximum(taken - wanted, passed - SEARCH_DEPTH), 0))
            chosen = np.concatenate([chosen, found[: end + 1][is_spare[: end + 1]]])
            looks = np.bincount(self.all_owners[found[: end + 1]])
            for owner in np.flatnonzero(looks).tolist():
                seen[owner] = seen.get(owner, 0) + int(looks[owner])
        if len(chosen) == count:
            return chosen
        first, marked = self._first(2 * count), self._marked
        marked[chosen] = True
        rest = first[~marked[first]]
        marked[chosen] = False
        return np.concatenate([chosen, rest[: count - len(chosen)]])

    def _are_spare(self, found: Slots, seen: dict[int, int]) -> "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]":
        """Which of these copies, in order, their owners have above their floors; `seen` of each were spent before."""
        is_spare = np.empty(len(found), bool)
        if not len(found):
            return is_spare
        by_owner = np.argsort(self.all_owners[found], kind="stable")
        owners: Slots = self.all_owners[found[by_owner]].astype(np.intp)
        firsts = np.flatnonzero(np.diff(owners, prepend=-1))
        counts = np.diff(firsts, append=len(found))
        its_own: list[int] = owners[firsts].tolist()
        left = [self._count_by_owner[one] - self.floor_by_owner.get(one, 0) - seen.get(one, 0) for one in its_own]
        is_spare[by_owner] = np.arange(len(found)) - np.repeat(firsts, counts) < np.repeat(left, counts)
        return is_spare

    def _first(self, count: int) -> Slots:
        """The first `count` copies in order, floors aside."""
        parts: list[Slots] = []
        for retention in range(_SEGMENTS):
            if count <= 0:
                break
            parts.append(self._first_of(retention, count))
            count -= len(parts[-1])
        return np.concatenate(parts) if parts else NO_SLOTS

    def _first_of(self, retention: int, count: int) -> Slots:
        """The first `count` copies of one segment."""
        count = min(count, self.counts[retention])
        if count > _MANY and 8 * count > self._slots:
            found = np.flatnonzero((self.all_classes == retention) & (self._all_ticks > 0))
            # Tables were dropped in runs: the ticks are nearly sorted, which a stable sort makes use of.
            return found[np.argsort(SlotIndex(found).read(self._all_ticks), kind="stable")[:count]]
        return as_slots(list(islice(self.order(retention), count)))

    # ---- protected share

    def demote(self, share: float, maximum: int) -> int:
        """While more than `share` of all copies are REUSED, its oldest becomes the newest of ONCE. Returns how many."""
        limit = int(share * self.count)
        moved = min(self.counts[_REUSED] - limit, maximum)
        for _ in range(moved):
            self.move(self._next[self._slots + _REUSED], _ONCE)
        return max(moved, 0)

    def snapshot(self) -> object:
        """All of it in comparable form, floors aside."""
        counts = self.count, tuple(self.counts), self.counts_by_owner()
        return (
            [tuple(self.order(retention)) for retention in RetentionClass],
            bytes(self.classes),
            self.owners.tolist(),
            counts,
        )

    def check(self) -> bool:
        """The counters agree with the lists, the links with each other."""
        by_owner: dict[int, int] = {}
        for retention in RetentionClass:
            before, listed = self._slots + retention, 0
            for slot in self.order(retention):
                is_right = self.classes[slot] == retention and self._previous[slot] == before and listed <= self._slots
                is_later = before >= self._slots or self._ticks[before] < self._ticks[slot]
                if not (is_right and is_later and self._ticks[slot]):
                    return False
                before, listed = slot, listed + 1
                by_owner[self.owners[slot]] = by_owner.get(self.owners[slot], 0) + 1
            if listed != self.counts[retention] or self._previous[self._slots + retention] != before:
                return False
        num_ticks = int(np.count_nonzero(self._all_ticks))
        return sum(self.counts) == self.count == num_ticks and by_owner == self.counts_by_owner()
