"""How many copies a tenant keeps below the device tier, and how many more a plan may send there."""

from collections.abc import Mapping

import numpy as np

from tiercel.errors import InvariantError
from tiercel.ids import SlotId
from tiercel.kvcache.pool import SlotPool
from tiercel.kvcache.slot_index import SlotIndex, Slots, as_index, count_each
from tiercel.tier import Tier


class CopyQuotas:
    """Copies by tier and owner: those that lie there, those on their way there and those that are being read.

    Below the device tier only transfers hold slots. A copy is therefore either cached, which its pool counts, or lent
    to transfers, which is counted here: once, however many transfers hold it.
    """

    def __init__(self, pools: Mapping[Tier, SlotPool]) -> None:
        self.max_blocks: dict[tuple[Tier, int], int] = {}  # the quotas; the OwnerBook writes them
        self._pools = dict(pools)
        self._lent: dict[SlotPool, dict[int, int]] = {pool: {} for pool in pools.values()}

    def held(self, tier: Tier, owner: int) -> int:
        """Copies of the owner in a lower tier, those that fly included."""
        pool = self._pools[tier]
        return pool.num_cached_of(owner) + self._lent[pool].get(owner, 0)

    def left(self, tier: Tier, owner: int) -> int | None:
        """Copies that the owner may still send to a lower tier; None: as many as there is room for."""
        maximum = self.max_blocks.get((tier, owner))
        return None if maximum is None or tier not in self._pools else max(0, maximum - self.held(tier, owner))

    # ---- references of transfers

    def own(self, pool: SlotPool, slot: SlotId, owner: int) -> None:
        """A transfer has taken an empty slot for a copy of the owner's."""
        pool.set_owner(slot, owner)
        self._lend(pool, slot)

    def hold(self, pool: SlotPool, slot: SlotId) -> None:
        """One more transfer refers to a slot of any tier."""
        pool.hold(slot, by_transfer=True)
        self._lend(pool, slot)

    def own_many(self, pool: SlotPool, index: SlotIndex, owners: Slots) -> None:
        """A transfer has taken empty slots for copies of these owners."""
        for owner, count in count_each(owners):
            pool.set_owner_many(index if count == len(index) else index.filter(owners == owner), owner)
        self._count(pool, index, 1)

    def hold_many(self, pool: SlotPool, slots: Slots | SlotIndex) -> None:
        """One more transfer refers to each of these slots of any tier."""
        index = as_index(slots)
        pool.hold_many(index, by_transfer=True)
        self._count(pool, index, 1)

    def drop_many(self, pool: SlotPool, slots: Slots | SlotIndex) -> None:
        """One transfer less refers to each of these slots of any tier."""
        index = as_index(slots)
        self._count(pool, index, -1)
        pool.drop_many(index, 0, by_transfer=True)

    def drop(self, pool: SlotPool, slot: SlotId) -> None:
        """One transfer less refers to a slot of any tier."""
        self._give_back(pool, slot)
        pool.drop(slot, 0, by_transfer=True)

    def discard(self, pool: SlotPool, slot: SlotId) -> None:
        """Free the target of a transfer whose content is worthless."""
        self._give_back(pool, slot)
        pool.discard(slot)

    def check_integrity(self) -> None:
        """Every owner's lent copies are those to which transfers refer. Errors: InvariantError."""
        for tier, pool in self._pools.items():
            counted: dict[int, int] = {}
            for slot, refs in enumerate(pool.transfer_refs):
                owner = pool.owner(SlotId(slot)) if refs else 0
                if owner:
                    counted[owner] = counted.get(owner, 0) + 1
            if counted != self._lent[pool]:
                raise InvariantError("quota.lent", tier=tier.value, lent=self._lent[pool], counted=counted)

    def _lend(self, pool: SlotPool, slot: SlotId) -> None:
        lent, owner = self._lent.get(pool), pool.owner(slot)
        if lent is not None and owner and pool.transfer_refs[slot] == 1:
            lent[owner] = lent.get(owner, 0) + 1

    def _count(self, pool: SlotPool, index: SlotIndex, change: int) -> None:
        """Count the slots to which exactly one transfer refers: each was just lent, or is about to be given back."""
        lent = self._lent.get(pool)
        if lent is None:
            return
        is_changed = index.read(pool.all_transfer_refs) == 1
        for owner, count in count_each(index.read(pool.all_owners)[is_changed]):
            if not owner:
                continue
            left = lent.get(owner, 0) + change * count
            if left:
                lent[owner] = left
            else:
                del lent[owner]

    def _give_back(self, pool: SlotPool, slot: SlotId) -> None:
        lent, owner = self._lent.get(pool), pool.owner(slot)
        if lent is None or not owner or pool.transfer_refs[slot] != 1:
            return
        if lent[owner] > 1:
            lent[owner] -= 1
        else:
            del lent[owner]


class SpillRoom:
    """What one plan may still send to the tier below: so many blocks, and so many copies of each owner.

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
        """Choose what goes down, from the head of the chain to the first block that may not. Return how many.

        `clean` evictable copies lie below already. They are kept with those that go down, and are no room any more.
        """
        chosen, counts = self._choose(dirty, clean)
        self.blocks -= chosen + clean
        for owner, count in counts.items():
            self._taken[owner] = self._taken.get(owner, 0) + count
        return chosen

    def _choose(self, dirty: SlotIndex, clean: int) -> tuple[int, dict[int, int]]:
        """How many blocks, and how many of each owner that has a quota."""
        chosen = min(len(dirty), max(0, self.blocks - clean))
        if not self._quotas.max_blocks:
            return chosen, {}
        owners = self._device.owners(dirty.head(chosen))
        limited: list[int] = []
        for owner in np.flatnonzero(np.bincount(owners)).tolist():
            maximum = self._quotas.left(self._tier, owner)
            if maximum is None:
                continue
            limited.append(owner)
            of_owner = np.flatnonzero(owners == owner)
            room = max(0, maximum - self._taken.get(owner, 0))
            if len(of_owner) > room:
                chosen = min(chosen, int(of_owner[room]))
        return chosen, {owner: int(np.count_nonzero(owners[:chosen] == owner)) for owner in limited}
