"""Restores of admitted sequences' blocks from DDR: their slots are in the table before their content has landed."""

from collections.abc import Callable

import numpy as np

from tiercel.kvcache.ledger import PrefixMatch
from tiercel.kvcache.slot_index import NO_SLOTS, Slots, as_slots
from tiercel.kvcache.swap import SwapBook
from tiercel.kvcache.table import BlockTable, Restore
from tiercel.kvcache.tiers import TierSet
from tiercel.values.ids import SlotId
from tiercel.values.tier import Transfer


class RestoreBook:
    """The restores under way, for the cache manager, which writes the block tables."""

    def __init__(self, tiers: TierSet, swaps: SwapBook, replace: Callable[[BlockTable, int, SlotId], None]) -> None:
        """`replace` points a table at the canonical copy of a block, instead of its own slot."""
        self.loaded_blocks = 0  # that came up since the start
        self._tiers = tiers
        self._swaps = swaps
        self._replace = replace
        self._table_by_transfer: dict[int, BlockTable] = {}

    def begin(self, table: BlockTable, match: PrefixMatch, targets: Slots, covered: int) -> None:
        """Restore the loads of a match into slots of the table, whose match covers `covered` blocks."""
        carried = self._swaps.restore(table, match.loads, match.sources, targets)
        ends = np.cumsum([count for _, count in carried]).tolist()
        blocks_by_transfer = {
            number: match.loads[end - count : end] for (number, count), end in zip(carried, ends, strict=True)
        }
        table.restore = Restore(covered, blocks_by_transfer)
        self._table_by_transfer.update(dict.fromkeys(blocks_by_transfer, table))

    def land(self, transfer: Transfer, *, is_good: bool) -> BlockTable | None:
        """Name the blocks that have landed. Return the table when no more of its blocks are on their way up.

        The sequence may have ended or been preempted meanwhile: then the blocks are a cached prefix, or worthless.
        """
        pool, links = self._tiers.device, self._tiers.links
        table, targets = self._table_by_transfer.pop(transfer.id), as_slots(transfer.targets)
        restore = None if table.is_closed else table.restore
        blocks = restore.blocks_by_transfer.pop(transfer.id, None) if restore is not None else None
        if is_good and links is not None:
            links.link_restored(targets, as_slots(transfer.sources))
        lost = pool.publish_many(targets, transfer.keys) if is_good else NO_SLOTS
        pool.drop_many(targets, 0, by_transfer=True)
        if restore is None or blocks is None:
            return None
        if is_good:
            restore.landed += len(blocks)
            for slot in lost.tolist():  # the block was computed meanwhile: its first copy is the canonical one
                block = int(blocks[transfer.targets.index(SlotId(slot))])
                self._replace(table, block, SlotId(slot))
                restore.replaced.append(table.slots[block])
        else:
            restore.covered, restore.is_whole = min(restore.covered, int(blocks[0])), False
        if restore.blocks_by_transfer:
            return None
        self._end(table, restore)
        return table

    def _end(self, table: BlockTable, restore: Restore) -> None:
        """Cut the table to the blocks that have landed without a gap, and note whose copies they are."""
        table.restore = None
        self._swaps.note_restored(table, restore.landed)
        self.loaded_blocks += restore.landed
        own_slots = as_slots(table.slots[restore.first : restore.covered])
        if restore.replaced:
            own_slots = own_slots[~np.isin(own_slots, restore.replaced)]
        self._tiers.device.copies.set_owner_many(own_slots, table.owner)
        table.num_published = restore.covered
        if not restore.is_whole:
            self._tiers.device.drop_many(as_slots(table.slots[restore.covered :])[::-1], table.last_step)
            table.cut(restore.covered)
