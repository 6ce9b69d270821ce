"""The numbers of tables and flying transfers that refer to the slots of a tier."""

from array import array
from collections.abc import Iterable

import numpy as np

from tiercel.kvcache.free_run import SlotRun
from tiercel.kvcache.slot_index import SlotIndex, view


class ReferenceCounts:
    """Reference counts by slot: of tables and transfers together, and of transfers alone."""

    def __init__(self, slots: int) -> None:
        self.totals = array("i", bytes(4 * slots))
        self.transfers = array("H", bytes(2 * slots))
        self.num_lent = 0  # slots to which only transfers refer
        self.all_totals, self.all_transfers = view(self.totals), view(self.transfers)

    def change(self, slot: int, change: int, by_transfer: bool) -> None:
        """Add a reference (`change` 1) or remove one (-1)."""
        total, lent = self.totals[slot], self.transfers[slot]
        self.totals[slot] = total + change
        if by_transfer or lent:
            self.num_lent -= 0 < lent == total
            if by_transfer:
                lent += change
                self.transfers[slot] = lent
            self.num_lent += 0 < lent == total + change

    def change_many(self, index: SlotIndex, change: int, by_transfer: bool) -> None:
        """Add a reference to each of these slots (`change` 1) or remove one (-1)."""
        totals, lent = index.read(self.all_totals), index.read(self.all_transfers)
        index.write(self.all_totals, totals + change)
        if by_transfer or lent.any():
            self.num_lent -= int(np.count_nonzero((lent > 0) & (lent == totals)))
            if by_transfer:
                lent = lent + change if change > 0 else lent - 1
                index.write(self.all_transfers, lent)
            self.num_lent += int(np.count_nonzero((lent > 0) & (lent == totals + change)))

    def own_many(self, index: SlotIndex, by_transfer: bool) -> None:
        """Give unreferenced slots one reference each."""
        index.write(self.all_totals, 1)
        if by_transfer:
            index.write(self.all_transfers, 1)
            self.num_lent += len(index.slots)

    def own_runs(self, found: Iterable[SlotRun], by_transfer: bool) -> None:
        """Give the unreferenced slots of these runs one reference each."""
        for first, length in found:
            self.totals[first : first + length] = array("i", [1]) * length
            if by_transfer:
                self.transfers[first : first + length] = array("H", [1]) * length
                self.num_lent += length
