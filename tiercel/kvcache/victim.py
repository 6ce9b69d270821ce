"""The choice of the copies that are evicted next."""

from itertools import islice

import numpy as np
import numpy.typing as npt

from tiercel.kvcache.eviction import NUM_CLASSES, CopyBook
from tiercel.kvcache.slot_index import MIN_NUMPY_SLOTS, NO_SLOTS, Slots

SEARCH_DEPTH = 64
"""Copies of one retention class that a search may pass over to spare the owners at their floor."""


class VictimSearch:
    """Chooses victims in eviction order, and spares the owners that have no more copies than their floor.

    An owner's floor is the number of copies that stay cached for the owner while another owner's copy can go.
    """

    def __init__(self, copies: CopyBook) -> None:
        self.floor_by_owner: dict[int, int] = {}
        self.copies = copies
        self._is_chosen = np.zeros(copies.slots, bool)  # all False between two calls

    def set_floor(self, owner: int, blocks: int) -> None:
        """Set how many copies stay cached for an owner; 0 removes the floor."""
        if blocks:
            self.floor_by_owner[owner] = blocks
        else:
            self.floor_by_owner.pop(owner, None)

    def choose(self, count: int) -> list[int]:
        """Return the next `count` copies to evict, or all if there are fewer.

        The first non-empty class goes first, and in it the copy that was released first: of a chain, whose table was
        dropped from its end, the tail. Owners at or under their floor are passed over up to `SEARCH_DEPTH` times a
        class; if the others do not suffice, the order alone decides.
        Cost: O(count + SEARCH_DEPTH).
        """
        if count >= MIN_NUMPY_SLOTS:
            return self.choose_many(count).tolist()
        if self.floor_by_owner:
            return self._choose_above_floors(count)
        return list(islice(self.copies, count))

    def choose_many(self, count: int) -> Slots:
        """Make the same choice as `choose`, for many copies, at a fraction of the time for each copy."""
        if not self.floor_by_owner:
            return self.copies.first(count)
        chosen = NO_SLOTS
        seen: dict[int, int] = {}  # copies looked at, by owner
        for retention in range(NUM_CLASSES):
            wanted = count - len(chosen)
            if not wanted:
                return chosen
            found = self.copies.first_of(retention, wanted + SEARCH_DEPTH)
            is_spare = self._are_spare(found, seen)
            # The search ends at the last copy that is wanted, or at the last one that may be passed over.
            taken, passed = np.cumsum(is_spare), np.cumsum(~is_spare)
            end = int(np.searchsorted(np.maximum(taken - wanted, passed - SEARCH_DEPTH), 0))
            chosen = np.concatenate([chosen, found[: end + 1][is_spare[: end + 1]]])
            looks = np.bincount(self.copies.all_owners[found[: end + 1]])
            for owner in np.flatnonzero(looks).tolist():
                seen[owner] = seen.get(owner, 0) + int(looks[owner])
        if len(chosen) == count:
            return chosen
        first, is_chosen = self.copies.first(2 * count), self._is_chosen
        is_chosen[chosen] = True
        rest = first[~is_chosen[first]]
        is_chosen[chosen] = False
        return np.concatenate([chosen, rest[: count - len(chosen)]])

    def _choose_above_floors(self, count: int) -> list[int]:
        copies = self.copies
        chosen: list[int] = []
        left_by_owner: dict[int, int] = {}  # copies above the floor
        spared: set[int] = set()
        for retention in range(NUM_CLASSES):
            depth = SEARCH_DEPTH
            for slot in copies.order(retention):
                if not depth or len(chosen) == count:
                    break
                owner = copies.owners[slot]
                if owner in spared:
                    depth -= 1
                    continue
                left = left_by_owner.get(owner)
                if left is None:
                    left = copies.num_cached_of(owner) - self.floor_by_owner.get(owner, 0)
                left_by_owner[owner] = left - 1
                if left > 0:
                    chosen.append(slot)
                else:
                    spared.add(owner)
                    depth -= 1
            if len(chosen) == count:
                return chosen
        known = set(chosen)
        first = islice(copies, 2 * count)  # enough: `count` of them are not chosen yet
        return chosen + [slot for slot in first if slot not in known][: count - len(chosen)]

    def _are_spare(self, found: Slots, seen: dict[int, int]) -> npt.NDArray[np.bool_]:
        """Return for each of these copies, in order, whether its owner has it above the floor.

        `seen` says how many copies of each owner the search looked at before.
        """
        is_spare = np.empty(len(found), bool)
        if not len(found):
            return is_spare
        copies = self.copies
        by_owner = np.argsort(copies.all_owners[found], kind="stable")
        owners: Slots = copies.all_owners[found[by_owner]].astype(np.intp)
        firsts = np.flatnonzero(np.diff(owners, prepend=-1))
        counts = np.diff(firsts, append=len(found))
        each_owner: list[int] = owners[firsts].tolist()
        left = [copies.num_cached_of(one) - self.floor_by_owner.get(one, 0) - seen.get(one, 0) for one in each_owner]
        is_spare[by_owner] = np.arange(len(found)) - np.repeat(firsts, counts) < np.repeat(left, counts)
        return is_spare
