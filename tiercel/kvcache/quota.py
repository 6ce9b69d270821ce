"""The number of copies that a tenant keeps below the device tier, and that a plan may add."""

from collections.abc import Mapping

import numpy as np

from tiercel.kvcache.pool import SlotPool
from tiercel.kvcache.slot_index import SlotIndex, Slots, as_index, count_each
from tiercel.values.errors import InvariantError
from tiercel.values.ids import SlotId
from tiercel.values.tier import Tier


class CopyQuotas:
    """Quotas by tier and owner, and the copies that count: those in the tier, on their way there, or being read.

    Below the device tier only transfers hold slots. A copy is therefore either cached, which its pool counts, or lent
    to transfers, which is counted here: once, even if several transfers hold the slot.
    """

    def __init__(self, pools: Mapping[Tier, SlotPool]) -> None:
        self._max_blocks: dict[tuple[Tier, int], int] = {}  # the quotas
        self._pools = dict(pools)
        self._lent: dict[SlotPool, dict[int, int]] = {pool: {} for pool in pools.values()}  # copies by owner

    def set_quota(self, tier: Tier, owner: int, max_blocks: int | None) -> None:
        """Set how many copies an owner may have in a lower tier; None: no quota."""
        if max_blocks is None:
            self._max_blocks.pop((tier, owner), None)
        else:
            self._max_blocks[tier, owner] = max_blocks

    @property
    def has_any(self) -> bool:
        """Whether any owner has a quota."""
        return bool(self._max_blocks)

    def held(self, tier: Tier, owner: int) -> int:
        """Return the number of an owner's copies in a lower tier, those that fly included."""
        pool = self._pools[tier]
        return pool.copies.num_cached_of(owner) + self._lent[pool].get(owner, 0)

    def left(self, tier: Tier, owner: int) -> int | None:
        """Return how many copies an owner may still send to a lower tier; None: no quota."""
        maximum = self._max_blocks.get((tier, owner))
        return None if maximum is None or tier not in self._pools else max(0, maximum - self.held(tier, owner))

    # ---- references of transfers

    def own(self, pool: SlotPool, slot: SlotId, owner: int) -> None:
        """Note that a transfer has taken an empty slot for a copy of this owner."""
        pool.copies.set_owner(slot, owner)
        self._lend(pool, slot)

    def hold(self, pool: SlotPool, slot: SlotId) -> None:
        """Add a transfer's reference to a slot of any tier."""
        pool.hold(slot, by_transfer=True)
        self._lend(pool, slot)

    def drop(self, pool: SlotPool, slot: SlotId) -> None:
        """Remove a transfer's reference from a slot of any tier."""
        self._give_back(pool, slot)
        pool.drop(slot, 0, by_transfer=True)

    def discard(self, pool: SlotPool, slot: SlotId) -> None:
        """Free the target of a transfer whose content is worthless."""
        self._give_back(pool, slot)
        pool.discard(slot)

    def own_many(self, pool: SlotPool, index: SlotIndex, owners: Slots) -> None:
        """Note that a transfer has taken empty slots for copies of these owners."""
        for owner, count in count_each(owners):
            pool.copies.set_owner_many(index if count == len(index) else index.filter(owners == owner), owner)
        self._count(pool, index, 1)

    def hold_many(self, pool: SlotPool, slots: Slots | SlotIndex) -> None:
        """Add a transfer's reference to each of these slots of any tier."""
        index = as_index(slots)
        pool.hold_many(index, by_transfer=True)
        self._count(pool, index, 1)

    def drop_many(self, pool: SlotPool, slots: Slots | SlotIndex) -> None:
        """Remove a transfer's reference from each of these slots of any tier."""
        index = as_index(slots)
        self._count(pool, index, -1)
        pool.drop_many(index, 0, by_transfer=True)

    def check_integrity(self) -> None:
        """Check that every owner's lent copies are those to which transfers refer. Errors: InvariantError."""
        for tier, pool in self._pools.items():
            counted: dict[int, int] = {}
            for slot, refs in enumerate(pool.transfer_refs):
                owner = pool.copies.owner(slot) if refs else 0
                if owner:
                    counted[owner] = counted.get(owner, 0) + 1
            if counted != self._lent[pool]:
                raise InvariantError("quota.lent", tier=tier.value, lent=self._lent[pool], counted=counted)

    def _lend(self, pool: SlotPool, slot: SlotId) -> None:
        lent, owner = self._lent.get(pool), pool.copies.owner(slot)
        if lent is not None and owner and pool.transfer_refs[slot] == 1:
            lent[owner] = lent.get(owner, 0) + 1

    def _give_back(self, pool: SlotPool, slot: SlotId) -> None:
        lent, owner = self._lent.get(pool), pool.copies.owner(slot)
        if lent is None or not owner or pool.transfer_refs[slot] != 1:
            return
        if lent[owner] > 1:
            lent[owner] -= 1
        else:
            del lent[owner]

    def _count(self, pool: SlotPool, index: SlotIndex, change: int) -> None:
        """Count the slots with exactly one transfer's reference: just lent, or about to be given back."""
        lent = self._lent.get(pool)
        if lent is None:
            return
        is_changed = index.read(pool.all_transfer_refs) == 1
        for owner, count in count_each(pool.copies.owners_of(index)[is_changed]):
            if not owner:
                continue
            left = lent.get(owner, 0) + change * count
            if left:
                lent[owner] = left
            else:
                del lent[owner]


class SpillRoom:
    """The number of blocks, and of copies of each owner, that one plan may still send to the tier below.

    A plan draws on one of these, and sealing takes from a fresh one in the same order: both choose the same blocks.
    """

    def __init__(self, blocks: int, tier: Tier, device: SlotPool, quotas: CopyQuotas) -> None:
        self.blocks = blocks
        self._tier = tier
        self._device = device
        self._quotas = quotas
        self._taken: dict[int, int] = {}  # copies by owner

    def count(self, dirty: SlotIndex, clean: int) -> int:
        """Return how many of these slots of the device tier `take` would choose."""
        return self._choose(dirty, clean)[0]

    def take(self, dirty: SlotIndex, clean: int) -> int:
        """Choose what goes down, from the head of the chain to the first block that may not. Return how many blocks.

        `clean` evictable copies of the table lie below already. They are kept, too, and make no room.
        """
        chosen, counts = self._choose(dirty, clean)
        self.blocks -= chosen + clean
        for owner, count in counts.items():
            self._taken[owner] = self._taken.get(owner, 0) + count
        return chosen

    def shrink(self, blocks: int) -> None:
        """Take away the room of copies that a restore holds; a negative number gives the room back."""
        self.blocks -= blocks

    def _choose(self, dirty: SlotIndex, clean: int) -> tuple[int, dict[int, int]]:
        """Return how many blocks, and how many of each owner that has a quota."""
        chosen = min(len(dirty), max(0, self.blocks - clean))
        if not self._quotas.has_any:
            return chosen, {}
        owners = self._device.copies.owners_of(dirty.head(chosen))
        limited: list[int] = []
        for owner in np.flatnonzero(np.bincount(owners)).tolist():
            left = self._quotas.left(self._tier, owner)
            if left is None:
                continue
            limited.append(owner)
            of_owner = np.flatnonzero(owners == owner)
            room = max(0, left - self._taken.get(owner, 0))
            if len(of_owner) > room:
                chosen = min(chosen, int(of_owner[room]))
        return chosen, {owner: int(np.count_nonzero(owners[:chosen] == owner)) for owner in limited}
