"""Transfers between tiers: what flies, and which copies are on their way."""

from array import array
from collections.abc import Sequence

from kvcache.pool import SlotPool
from kvcache.vector import FEW, as_slots, view
from tiercel.errors import InvariantError
from tiercel.ids import BlockKey, SlotId
from tiercel.tier import Purpose, Route, Tier, Transfer

DESTINATIONS = {
    Route.SPILL: Tier.DDR,
    Route.RESTORE: Tier.HBM,
    Route.PERSIST: Tier.SSD,
    Route.PREFETCH: Tier.DDR,
    Route.VERIFY: Tier.DDR,
}
"""Where a route puts a copy. SIGN puts none."""


class _Marks:
    """By slot of a source: the id of the transfer that carries its block to another tier of memory; 0: none does."""

    def __init__(self, pool: SlotPool) -> None:
        self.pool = pool
        self._ids = array("i", bytes(4 * (pool.blocks + 1)))
        self._all = view(self._ids)

    def set(self, slots: Sequence[SlotId], transfer_id: int) -> bool:
        """Say that a transfer carries these blocks. False, and nothing is changed, when one of them flies already."""
        if len(slots) < FEW:
            if any(self._ids[slot] for slot in slots):
                return False
            for slot in slots:
                self._ids[slot] = transfer_id
            return True
        many = as_slots(slots)
        if self._all[many].any():
            return False
        self._all[many] = transfer_id
        return True

    def clear(self, slots: Sequence[SlotId]) -> None:
        """Say that the transfer is over."""
        self._all[as_slots(slots)] = 0

    def of(self, key: BlockKey) -> int | None:
        """Return the id of the transfer that carries this block; None when none does."""
        slot = self.pool.slot_by_key.get(key)
        return None if slot is None else self._ids[slot] or None


class TransferBook:
    """Flying transfers by id, and by block and destination: at most one a pair, later wishes join it.

    Transfers between tiers of memory may carry very many blocks. Those blocks are known by the slots of their
    sources, which are held and keep their names while the transfer flies.
    """

    def __init__(self, device: SlotPool | None = None, host: SlotPool | None = None) -> None:
        both = device is not None and host is not None
        self._marks = {Route.SPILL: _Marks(device), Route.RESTORE: _Marks(host)} if both else {}
        self._marks_by_tier = {DESTINATIONS[route]: marks for route, marks in self._marks.items()}
        self._next_id = 1
        self._flying: dict[int, Transfer] = {}
        self._late: set[int] = set()  # abandoned, but their call has not come back
        self._id_by_copy: dict[tuple[Tier, BlockKey], int] = {}
        self._blocks_by_route: dict[tuple[Route, Purpose], int] = {}

    def __len__(self) -> int:
        return len(self._flying)

    def open(
        self,
        route: Route,
        purpose: Purpose,
        keys: tuple[BlockKey, ...],
        sources: tuple[SlotId, ...],
        targets: tuple[SlotId, ...] = (),
    ) -> Transfer:
        """A new transfer flies. Errors: InvariantError when one of its blocks already flies there."""
        transfer = Transfer(self._next_id, route, purpose, keys, sources, targets)
        self._next_id += 1
        self._flying[transfer.id] = transfer
        tier, marks = DESTINATIONS.get(route), self._marks.get(route)
        if marks is not None:
            if not marks.set(sources, transfer.id):
                raise InvariantError("transfer.twice", route=route.value, id=transfer.id)
        elif tier is not None:
            for key in keys:
                if self._id_by_copy.setdefault((tier, key), transfer.id) != transfer.id:
                    raise InvariantError("transfer.twice", route=route.value, id=transfer.id)
        self._count(transfer, len(keys))
        return transfer

    def close(self, transfer_id: int) -> Transfer:
        """It has landed, failed or returned."""
        transfer = self._flying.pop(transfer_id)
        self._late.discard(transfer_id)
        tier, marks = DESTINATIONS.get(transfer.route), self._marks.get(transfer.route)
        if marks is not None:
            marks.clear(transfer.sources)
        elif tier is not None:
            for key in transfer.keys:
                del self._id_by_copy[tier, key]
        self._count(transfer, -len(transfer.keys))
        return transfer

    def abandon(self, transfer_id: int) -> Transfer:
        """Its deadline has passed: nobody waits for it any more, its slots stay its own."""
        self._late.add(transfer_id)
        return self._flying[transfer_id]

    def is_flying(self, tier: Tier, key: BlockKey) -> bool:
        """A copy of this block is on its way there, be it for nobody."""
        return self._find(tier, key) is not None

    def is_coming(self, tier: Tier, key: BlockKey) -> bool:
        """A copy of this block can be waited for."""
        found = self._find(tier, key)
        return found is not None and found not in self._late

    def target(self, tier: Tier, key: BlockKey) -> SlotId | None:
        """Return where a copy of this block will lie that a disk or a check brings; None: none of those does."""
        found = self._id_by_copy.get((tier, key))
        if found is None:
            return None
        transfer = self._flying[found]
        return (transfer.targets or transfer.sources)[transfer.keys.index(key)]

    def _find(self, tier: Tier, key: BlockKey) -> int | None:
        """Return the id of the transfer that brings a copy of this block there."""
        found, marks = self._id_by_copy.get((tier, key)), self._marks_by_tier.get(tier)
        return found if found is not None or marks is None else marks.of(key)

    def blocks(self, route: Route, purpose: Purpose) -> int:
        """Blocks that fly on a route for a purpose."""
        return self._blocks_by_route.get((route, purpose), 0)

    def flying(self) -> tuple[Transfer, ...]:
        """All of them."""
        return tuple(self._flying.values())

    def _count(self, transfer: Transfer, change: int) -> None:
        kind = transfer.route, transfer.purpose
        self._blocks_by_route[kind] = self._blocks_by_route.get(kind, 0) + change
