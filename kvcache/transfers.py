"""Transfers between tiers: what flies, and which copies are on their way."""

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


class TransferBook:
    """Flying transfers by id, and by block and destination: at most one a pair, later wishes join it."""

    def __init__(self) -> None:
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
        tier = DESTINATIONS.get(route)
        if tier is not None:
            for key in keys:
                if self._id_by_copy.setdefault((tier, key), transfer.id) != transfer.id:
                    raise InvariantError("transfer.twice", route=route.value, id=transfer.id)
        self._count(transfer, len(keys))
        return transfer

    def close(self, transfer_id: int) -> Transfer:
        """It has landed, failed or returned."""
        transfer = self._flying.pop(transfer_id)
        self._late.discard(transfer_id)
        tier = DESTINATIONS.get(transfer.route)
        if tier is not None:
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
        return (tier, key) in self._id_by_copy

    @property
    def num_late(self) -> int:
        """Reads whose deadline has passed and whose calls have not come back."""
        return len(self._late)

    def is_coming(self, tier: Tier, key: BlockKey, *, with_reads: bool = True) -> bool:
        """A copy of this block can be waited for; with `with_reads` false, one that does not come from the disk."""
        found = self._id_by_copy.get((tier, key))
        if found is None or found in self._late:
            return False
        return with_reads or self._flying[found].route is not Route.PREFETCH

    def blocks(self, route: Route, purpose: Purpose) -> int:
        """Blocks that fly on a route for a purpose."""
        return self._blocks_by_route.get((route, purpose), 0)

    def flying(self) -> tuple[Transfer, ...]:
        """All of them."""
        return tuple(self._flying.values())

    def _count(self, transfer: Transfer, change: int) -> None:
        kind = transfer.route, transfer.purpose
        self._blocks_by_route[kind] = self._blocks_by_route.get(kind, 0) + change
