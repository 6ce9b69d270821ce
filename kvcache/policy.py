"""Which unreferenced copy goes first when room is needed."""

import enum
from array import array
from collections.abc import Iterator
from itertools import islice

SEARCH_DEPTH = 64
"""Copies of one segment that a search looks at to spare the owners at their floor."""


class Keep(enum.IntEnum):
    """What a copy is kept for, in the order of eviction."""

    SHADOW = 0  # a higher tier has the same block
    ONCE = 1  # seen once
    REUSED = 2  # hit at least once
    WANTED = 3  # prefetched, or needed by a request that waits
    PREEMPTED = 4  # last copy of a preempted sequence


_SEGMENTS = len(Keep)
_ONCE, _REUSED = int(Keep.ONCE), int(Keep.REUSED)


class Segments:
    """The unreferenced copies of a tier, a list for each `Keep`, in the order of their last release.

    All lists share two arrays, with one sentinel each behind the slots: a slot leaves from the middle in O(1) and no
    object exists per slot. What a slot is kept for and whose it is are known for every slot and count while it is
    listed.
    """

    def __init__(self, slots: int) -> None:
        self.keeps = bytearray([_ONCE]) * slots
        self.owners = array("H", bytes(2 * slots))
        self.floor_by_owner: dict[int, int] = {}
        self.count = 0
        self.counts = [0] * _SEGMENTS
        self._slots = slots
        self._count_by_owner = array("i", [0])
        self._next = array("i", bytes(4 * slots))
        self._next.extend(range(slots, slots + _SEGMENTS))
        self._previous = array("i", self._next)

    def order(self, keep: int) -> Iterator[int]:
        """Slots of one segment, the first to go first."""
        following, end = self._next, self._slots + keep
        slot = following[end]
        while slot != end:
            yield slot
            slot = following[slot]

    def __iter__(self) -> Iterator[int]:
        """Slots of all segments, first victim first."""
        for keep in Keep:
            yield from self.order(keep)

    def count_of(self, owner: int) -> int:
        """Listed copies of an owner."""
        return self._count_by_owner[owner] if owner < len(self._count_by_owner) else 0

    def counts_by_owner(self) -> dict[int, int]:
        """Listed copies of every owner that has any."""
        return {owner: count for owner, count in enumerate(self._count_by_owner) if count}

    # ---- lists

    def add(self, slot: int) -> None:
        """A copy became unreferenced: it is the last of its segment to go."""
        end = self._slots + self.keeps[slot]
        last = self._previous[end]
        self._next[last] = self._previous[end] = slot
        self._previous[slot] = last
        self._next[slot] = end
        self.count += 1
        self.counts[self.keeps[slot]] += 1
        self._count_by_owner[self.owners[slot]] += 1

    def remove(self, slot: int) -> None:
        """A copy is referenced again, or evicted."""
        before, behind = self._previous[slot], self._next[slot]
        self._next[before] = behind
        self._previous[behind] = before
        self.count -= 1
        self.counts[self.keeps[slot]] -= 1
        self._count_by_owner[self.owners[slot]] -= 1

    def move(self, slot: int, keep: int) -> None:
        """Put a listed slot to the recent end of a segment."""
        self.remove(slot)
        self.keeps[slot] = keep
        self.add(slot)

    def reset(self, slot: int) -> None:
        """An unlisted slot is nobody's and seen by nobody."""
        self.keeps[slot], self.owners[slot] = _ONCE, 0

    def set_owner(self, slot: int, owner: int, *, is_listed: bool) -> None:
        """Say whose copy it is."""
        counts = self._count_by_owner
        if owner >= len(counts):
            counts.extend(array("i", bytes(4 * (owner + 1 - len(counts)))))
        if is_listed:
            counts[self.owners[slot]] -= 1
            counts[owner] += 1
        self.owners[slot] = owner

    # ---- choice

    def victims(self, count: int) -> list[int]:
        """The next `count` copies to go, at most all.

        The first non-empty segment goes first, and in it the least recently released: of a chain, whose table was
        dropped from its end, the tail. Owners at or under their floor are passed over while the search finds anybody
        else's; past that the order alone decides.
        Cost: O(count + SEARCH_DEPTH).
        """
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

    # ---- protected share

    def demote(self, share: float, most: int) -> int:
        """While more than `share` of all copies are REUSED, its oldest becomes the newest of ONCE. Returns how many."""
        limit = int(share * self.count)
        moved = min(self.counts[_REUSED] - limit, most)
        for _ in range(moved):
            self.move(self._next[self._slots + _REUSED], _ONCE)
        return max(moved, 0)

    def snapshot(self) -> object:
        """All of it in comparable form, floors aside."""
        counts = self.count, tuple(self.counts), self.counts_by_owner()
        return [tuple(self.order(keep)) for keep in Keep], bytes(self.keeps), self.owners.tolist(), counts

    def check(self) -> bool:
        """The counters agree with the lists, the links with each other."""
        by_owner: dict[int, int] = {}
        for keep in Keep:
            before, listed = self._slots + keep, 0
            for slot in self.order(keep):
                if self.keeps[slot] != keep or self._previous[slot] != before or listed > self._slots:
                    return False
                before, listed = slot, listed + 1
                by_owner[self.owners[slot]] = by_owner.get(self.owners[slot], 0) + 1
            if listed != self.counts[keep] or self._previous[self._slots + keep] != before:
                return False
        return sum(self.counts) == self.count and by_owner == self.counts_by_owner()
