"""Transfers between tiers: what flies, and which copies are on their way."""

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from tiercel.errors import InvariantError
from tiercel.ids import BlockKey, SlotId
from tiercel.kvcache.pool import SlotPool
from tiercel.kvcache.slot_index import MIN_NUMPY_SLOTS, SlotIndex, Slots, as_slots, view
from tiercel.tier import Purpose, Route, Tier, Transfer

DESTINATIONS = {
    Route.SPILL: Tier.DDR,
    Route.RESTORE: Tier.HBM,
    Route.PERSIST: Tier.SSD,
    Route.PREFETCH: Tier.DDR,
    Route.VERIFY: Tier.DDR,
}
"""Where a route puts a copy. SIGN puts none."""


_MAX_STARTED = 2  # prepared transfers that start at once


KeysOf = Callable[[Slots], list[BlockKey]]
"""The keys of some blocks of a sequence, by their numbers. What it returns for a block never changes."""


class _Prepared(Struct, frozen=True, gc=False):
    """Blocks that will fly together soon; their slots are held already."""

    id: int
    route: Route
    purpose: Purpose
    keys_of: KeysOf
    blocks: Slots
    sources: Slots
    targets: Slots


class _Marks:
    """By slot of a source: the id of the transfer that carries its block to another tier of memory; 0: none does."""

    def __init__(self, pool: SlotPool) -> None:
        self.pool = pool
        self._ids = array("i", bytes(4 * (pool.blocks + 1)))
        self._all = view(self._ids)

    def set_many(self, index: SlotIndex, ids: Slots) -> bool:
        """The same as `set`, with an id for each block."""
        if index.read(self._all).any():
            return False
        index.write(self._all, ids)
        return True

    def are_flying(self, slots: Slots) -> "npt.NDArray[np.bool_]":
        """Return for each slot whether a transfer carries its block."""
        return SlotIndex(slots).read(self._all) != 0

    def set(self, slots: Sequence[SlotId], transfer_id: int) -> bool:
        """Say that a transfer carries these blocks. False, and nothing is changed, when one of them flies already."""
        if len(slots) < MIN_NUMPY_SLOTS:
            if any(self._ids[slot] for slot in slots):
                return False
            for slot in slots:
                self._ids[slot] = transfer_id
            return True
        many = SlotIndex(as_slots(slots))
        if many.read(self._all).any():
            return False
        many.write(self._all, transfer_id)
        return True

    def clear(self, slots: Sequence[SlotId]) -> None:
        """Say that the transfer is over."""
        SlotIndex(as_slots(slots)).write(self._all, 0)

    def transfer_of(self, key: BlockKey) -> int | None:
        """Return the id of the transfer that carries this block; None when none does."""
        slot = self.pool.slot_by_key.get(key)
        return None if slot is None else self._ids[slot] or None


class TransferBook:
    """Flying transfers by id, and by block and destination: at most one a pair, later wishes join it.

    Transfers between tiers of memory may carry very many blocks. Those blocks are known by the slots of their
    sources, which are held and keep their names while the transfer flies.
    """

    def __init__(
        self, device: SlotPool | None = None, host: SlotPool | None = None, *, carried_blocks: int = 2048
    ) -> None:
        """`carried_blocks`: of one transfer between tiers of memory."""
        self._carried = carried_blocks
        self._marks: dict[Route, _Marks] = {}
        if device is not None and host is not None:
            self._marks = {Route.SPILL: _Marks(device), Route.RESTORE: _Marks(host)}
        self._marks_by_tier = {DESTINATIONS[route]: marks for route, marks in self._marks.items()}
        self._next_id = 1
        self._prepared: deque[_Prepared] = deque()
        self._flying: dict[int, Transfer] = {}
        self._late: set[int] = set()  # abandoned, but their call has not come back
        self._id_by_copy: dict[tuple[Tier, BlockKey], int] = {}
        self._blocks_by_route: dict[tuple[Route, Purpose], int] = {}

    def __len__(self) -> int:
        return len(self._flying) + len(self._prepared)

    def prepare(
        self, route: Route, purpose: Purpose, keys_of: KeysOf, blocks: Slots, sources: SlotIndex, targets: Slots
    ) -> list[tuple[int, int]]:
        """Carry many blocks between tiers of memory: their transfers start a few at a time, and count as flying now.

        The keys are looked up when a transfer starts: a copy of 65,536 of them costs 1 ms.
        Return the id of each transfer and how many of the blocks it carries, in order.
        Errors: InvariantError when one of the blocks already flies there.
        """
        first = self._next_id
        self._next_id += -(-len(blocks) // self._carried)
        ids = np.repeat(np.arange(first, self._next_id), self._carried)[: len(blocks)]
        if not self._marks[route].set_many(sources, ids):
            raise InvariantError("transfer.twice", route=route.value, id=first)
        self._count(route, purpose, len(blocks))
        carried: list[tuple[int, int]] = []
        for number in range(first, self._next_id):
            part = slice((number - first) * self._carried, (number - first + 1) * self._carried)
            prepared = _Prepared(number, route, purpose, keys_of, blocks[part], sources.slots[part], targets[part])
            self._prepared.append(prepared)
            carried.append((number, len(prepared.blocks)))
        return carried

    def start(self) -> list[Transfer]:
        """Open some of the prepared transfers, in order. Cost: about 1 ms at most."""
        opened = [_open(self._prepared.popleft()) for _ in range(min(_MAX_STARTED, len(self._prepared)))]
        self._flying.update((transfer.id, transfer) for transfer in opened)
        return opened

    def are_rising(self, slots: Slots) -> "npt.NDArray[np.bool_]":
        """Return for each slot of DDR whether its block is on its way up."""
        return self._marks[Route.RESTORE].are_flying(slots)

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
        self._count(route, purpose, len(keys))
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
        self._count(transfer.route, transfer.purpose, -len(transfer.keys))
        return transfer

    def abandon(self, transfer_id: int) -> Transfer:
        """Its deadline has passed: nobody waits for it any more, its slots stay its own."""
        self._late.add(transfer_id)
        return self._flying[transfer_id]

    def is_flying(self, tier: Tier, key: BlockKey) -> bool:
        """A copy of this block is on its way there, be it for nobody."""
        return self._find(tier, key) is not None

    @property
    def num_late(self) -> int:
        """Reads whose deadline has passed and whose calls have not come back."""
        return len(self._late)

    def is_coming(self, tier: Tier, key: BlockKey, *, with_reads: bool = True) -> bool:
        """A copy of this block can be waited for; with `with_reads` false, one that does not come from the disk."""
        found = self._find(tier, key)
        if found is None or found in self._late:
            return False
        if with_reads or found not in self._flying:
            return True
        return self._flying[found].route is not Route.PREFETCH

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
        return found if found is not None or marks is None else marks.transfer_of(key)

    def blocks(self, route: Route, purpose: Purpose) -> int:
        """Blocks that fly on a route for a purpose."""
        return self._blocks_by_route.get((route, purpose), 0)

    def flying(self) -> tuple[Transfer, ...]:
        """All of them."""
        return (*self._flying.values(), *map(_open, self._prepared))

    def _count(self, route: Route, purpose: Purpose, change: int) -> None:
        kind = route, purpose
        self._blocks_by_route[kind] = self._blocks_by_route.get(kind, 0) + change


def _open(prepared: _Prepared) -> Transfer:
    sources, targets = (cast(list[SlotId], slots.tolist()) for slots in (prepared.sources, prepared.targets))
    keys = tuple(prepared.keys_of(prepared.blocks))
    return Transfer(prepared.id, prepared.route, prepared.purpose, keys, tuple(sources), tuple(targets))


def check_references(
    transfers: TransferBook, unverified: Iterable[SlotId], pools: Iterable[tuple[Tier, SlotPool]], gateway: Tier
) -> None:
    """Check the pools, and that every transfer reference belongs to a flying transfer. Errors: InvariantError."""
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
        above, below = ends[transfer.route]
        for tier, slots in ((above, transfer.sources), (below, transfer.targets)):
            for slot in slots:
                refs[tier, slot] = refs.get((tier, slot), 0) + 1
    for slot in unverified:
        refs[gateway, slot] = refs.get((gateway, slot), 0) + 1
    for tier, pool in pools:
        pool.check_integrity()
        counted = sum(count for (index, _), count in refs.items() if index is tier)
        wrong = [slot for (index, slot), count in refs.items() if index is tier and pool.transfer_refs[slot] != count]
        if wrong or counted != sum(pool.transfer_refs):
            raise InvariantError("tiers.references", tier=tier.value, slots=wrong[:8])
