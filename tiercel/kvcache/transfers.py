"""Transfers between tiers: which ones fly, and which copies are on their way."""

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from tiercel.kvcache.pool import SlotPool
from tiercel.kvcache.slot_index import MIN_NUMPY_SLOTS, SlotIndex, Slots, as_slots, view
from tiercel.kvcache.table import BlockTable
from tiercel.values.errors import InvariantError
from tiercel.values.ids import BlockKey, SlotId
from tiercel.values.tier import Purpose, Route, Tier, Transfer

_DESTINATIONS = {
    Route.SPILL: Tier.DDR,
    Route.RESTORE: Tier.HBM,
    Route.PERSIST: Tier.SSD,
    Route.PREFETCH: Tier.DDR,
    Route.VERIFY: Tier.DDR,
}  # where a route puts a copy; SIGN makes none

_MAX_STARTED = 2  # prepared transfers that start at once


class _PreparedTransfer(Struct, frozen=True, gc=False):
    """Blocks of one table that will fly together soon; their slots are held already."""

    id: int
    route: Route
    purpose: Purpose
    table: BlockTable
    blocks: Slots
    sources: Slots
    targets: Slots

    def open(self) -> Transfer:
        """Make the transfer. Its keys are looked up now; the keys of a table's blocks never change."""
        sources, targets = (cast(list[SlotId], slots.tolist()) for slots in (self.sources, self.targets))
        keys = tuple(self.table.keys_of(self.blocks))
        return Transfer(self.id, self.route, self.purpose, keys, tuple(sources), tuple(targets))


class _CarriedSlots:
    """The id of the transfer that carries a block to another memory tier, by slot of the source; 0: none."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._ids = array("i", bytes(4 * (pool.blocks + 1)))
        self._all_ids = view(self._ids)

    def set(self, slots: Sequence[SlotId], transfer_id: int) -> bool:
        """Note that a transfer carries these blocks. Return False, and change nothing, if one of them flies already."""
        if len(slots) >= MIN_NUMPY_SLOTS:
            return self.set_many(SlotIndex(as_slots(slots)), transfer_id)
        if any(self._ids[slot] for slot in slots):
            return False
        for slot in slots:
            self._ids[slot] = transfer_id
        return True

    def set_many(self, index: SlotIndex, ids: Slots | int) -> bool:
        """Do the same as `set`, with one id for all blocks or one for each."""
        if index.read(self._all_ids).any():
            return False
        index.write(self._all_ids, ids)
        return True

    def clear(self, slots: Sequence[SlotId]) -> None:
        """Note that the transfer is over."""
        SlotIndex(as_slots(slots)).write(self._all_ids, 0)

    def are_flying(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Return for each slot whether a transfer carries its block."""
        return SlotIndex(slots).read(self._all_ids) != 0

    def transfer_of(self, key: BlockKey) -> int | None:
        """Return the id of the transfer that carries this block; None if there is none."""
        slot = self._pool.slot_by_key.get(key)
        return None if slot is None else self._ids[slot] or None


class TransferBook:
    """Flying transfers by id, and by block and destination: one block flies to a tier at most once.

    Transfers between memory tiers may carry very many blocks. Those blocks are known by the slots of their sources,
    which are held and keep their names while the transfer flies.
    """

    def __init__(
        self, device: SlotPool | None = None, host: SlotPool | None = None, *, carried_blocks: int = 2048
    ) -> None:
        """`carried_blocks` is the most that one transfer between memory tiers carries."""
        self._carried_blocks = carried_blocks
        self._carried: dict[Route, _CarriedSlots] = {}
        if device is not None and host is not None:
            self._carried = {Route.SPILL: _CarriedSlots(device), Route.RESTORE: _CarriedSlots(host)}
        self._carried_by_tier = {_DESTINATIONS[route]: carried for route, carried in self._carried.items()}
        self._next_id = 1
        self._prepared: deque[_PreparedTransfer] = deque()
        self._flying: dict[int, Transfer] = {}
        self._queued: list[Transfer] = []  # of the flying ones: the mover has not got them yet
        self._table_by_id: dict[int, BlockTable] = {}  # the tables that transfers fly for
        self._late: set[int] = set()  # abandoned, but their calls have not come back
        self._id_by_copy: dict[tuple[Tier, BlockKey], int] = {}
        self._blocks_by_route: dict[tuple[Route, Purpose], int] = {}

    def __len__(self) -> int:
        return len(self._flying) + len(self._prepared)

    # ---- beginning

    def open(
        self,
        route: Route,
        purpose: Purpose,
        keys: tuple[BlockKey, ...],
        sources: tuple[SlotId, ...],
        targets: tuple[SlotId, ...] = (),
        table: BlockTable | None = None,
    ) -> Transfer:
        """Return a new flying transfer, which may fly for a table. The caller hands it to the mover or queues it.

        Errors: InvariantError if one of its blocks already flies there.
        """
        transfer = Transfer(self._next_id, route, purpose, keys, sources, targets)
        self._next_id += 1
        self._flying[transfer.id] = transfer
        tier, carried = _DESTINATIONS.get(route), self._carried.get(route)
        if carried is not None:
            if not carried.set(sources, transfer.id):
                raise InvariantError("transfer.twice", route=route.value, id=transfer.id)
        elif tier is not None:
            for key in keys:
                if self._id_by_copy.setdefault((tier, key), transfer.id) != transfer.id:
                    raise InvariantError("transfer.twice", route=route.value, id=transfer.id)
        if table is not None:
            self._table_by_id[transfer.id] = table
        self._count(route, purpose, len(keys))
        return transfer

    def queue(self, transfer: Transfer) -> None:
        """Hand an open transfer to the mover with the next `take_queued`."""
        self._queued.append(transfer)

    def take_queued(self) -> list[Transfer]:
        """Return the queued transfers, which the caller hands to the mover."""
        queued, self._queued = self._queued, []
        return queued

    def prepare(
        self, route: Route, purpose: Purpose, table: BlockTable, blocks: Slots, sources: SlotIndex, targets: Slots
    ) -> list[tuple[int, int]]:
        """Carry many blocks of a table between memory tiers.

        Their transfers count as flying now and start a few at a time, because the look-up of 65,536 keys costs 1 ms.
        Return the id of each transfer and how many of the blocks it carries, in order.
        Errors: InvariantError if one of the blocks already flies there.
        """
        first = self._next_id
        self._next_id += -(-len(blocks) // self._carried_blocks)
        ids = np.repeat(np.arange(first, self._next_id), self._carried_blocks)[: len(blocks)]
        if not self._carried[route].set_many(sources, ids):
            raise InvariantError("transfer.twice", route=route.value, id=first)
        self._count(route, purpose, len(blocks))
        carried: list[tuple[int, int]] = []
        for number in range(first, self._next_id):
            part = slice((number - first) * self._carried_blocks, (number - first + 1) * self._carried_blocks)
            prepared = _PreparedTransfer(
                number, route, purpose, table, blocks[part], sources.slots[part], targets[part]
            )
            self._prepared.append(prepared)
            self._table_by_id[number] = table
            carried.append((number, len(prepared.blocks)))
        return carried

    def start(self) -> list[Transfer]:
        """Open some of the prepared transfers, in order, for the mover. Cost: about 1 ms at most."""
        opened = [self._prepared.popleft().open() for _ in range(min(_MAX_STARTED, len(self._prepared)))]
        self._flying.update((transfer.id, transfer) for transfer in opened)
        return opened

    # ---- ending

    def close(self, transfer_id: int) -> tuple[Transfer, BlockTable | None]:
        """Forget a transfer that has landed, failed or returned. Return it, and the table that it flew for."""
        transfer = self._flying.pop(transfer_id)
        self._late.discard(transfer_id)
        tier, carried = _DESTINATIONS.get(transfer.route), self._carried.get(transfer.route)
        if carried is not None:
            carried.clear(transfer.sources)
        elif tier is not None:
            for key in transfer.keys:
                del self._id_by_copy[tier, key]
        self._count(transfer.route, transfer.purpose, -len(transfer.keys))
        return transfer, self._table_by_id.pop(transfer_id, None)

    def abandon(self, transfer_id: int) -> None:
        """Note that a transfer is late: no sequence waits for it any more. It keeps its slots until it returns."""
        self._late.add(transfer_id)

    # ---- facts

    @property
    def num_late(self) -> int:
        """Reads whose deadline has passed and whose calls have not come back."""
        return len(self._late)

    def blocks(self, route: Route, purpose: Purpose) -> int:
        """Return the number of blocks that fly on a route for a purpose."""
        return self._blocks_by_route.get((route, purpose), 0)

    def flying(self) -> tuple[Transfer, ...]:
        """Return all flying transfers, prepared ones included."""
        return (*self._flying.values(), *(prepared.open() for prepared in self._prepared))

    def is_flying(self, tier: Tier, key: BlockKey) -> bool:
        """Return whether a copy of this block is on its way to a tier, even a late one."""
        return self._find(tier, key) is not None

    def are_rising(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Return for each slot of DDR whether its block is on its way up."""
        return self._carried[Route.RESTORE].are_flying(slots)

    def is_coming(self, tier: Tier, key: BlockKey, *, with_reads: bool = True) -> bool:
        """Return whether a sequence can wait for a copy of this block; without reads, for one not from the disk."""
        found = self._find(tier, key)
        if found is None or found in self._late:
            return False
        if with_reads or found not in self._flying:
            return True
        return self._flying[found].route is not Route.PREFETCH

    def target(self, tier: Tier, key: BlockKey) -> SlotId | None:
        """Return where a copy of this block will lie that the disk or a check brings; None if neither brings one."""
        found = self._id_by_copy.get((tier, key))
        if found is None:
            return None
        transfer = self._flying[found]
        return (transfer.targets or transfer.sources)[transfer.keys.index(key)]

    def _find(self, tier: Tier, key: BlockKey) -> int | None:
        """Return the id of the transfer that brings a copy of this block to a tier."""
        found, carried = self._id_by_copy.get((tier, key)), self._carried_by_tier.get(tier)
        return found if found is not None or carried is None else carried.transfer_of(key)

    def _count(self, route: Route, purpose: Purpose, change: int) -> None:
        kind = route, purpose
        self._blocks_by_route[kind] = self._blocks_by_route.get(kind, 0) + change


def check_references(
    transfers: TransferBook, unverified: Iterable[SlotId], pools: Sequence[tuple[Tier, SlotPool]], gateway: Tier
) -> None:
    """Check that transfer references are those of flying transfers and unverified copies. Errors: InvariantError."""
    refs: dict[tuple[Tier, SlotId], int] = {}
    ends = {
        Route.SPILL: (Tier.HBM, Tier.DDR),
        Route.RESTORE: (Tier.DDR, Tier.HBM),
        Route.PERSIST: (gateway, Tier.SSD),
        Route.PREFETCH: (Tier.SSD, gateway),
        Route.VERIFY: (gateway, gateway),
        Route.SIGN: (gateway, gateway),
    }
    for transfer in transfers.flying():
        from_tier, to_tier = ends[transfer.route]
        for tier, slots in ((from_tier, transfer.sources), (to_tier, transfer.targets)):
            for slot in slots:
                refs[tier, slot] = refs.get((tier, slot), 0) + 1
    for slot in unverified:
        refs[gateway, slot] = refs.get((gateway, slot), 0) + 1
    for tier, pool in pools:
        counted = {slot: count for (of_tier, slot), count in refs.items() if of_tier is tier}
        wrong = [slot for slot, count in counted.items() if pool.transfer_refs[slot] != count]
        if wrong or sum(counted.values()) != sum(pool.transfer_refs):
            raise InvariantError("tiers.references", tier=tier.value, slots=wrong[:8])
