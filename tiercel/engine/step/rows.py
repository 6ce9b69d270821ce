"""The rows of running sequences in the runner's persistent arrays."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from tiercel.engine.step.tables import Patches
from tiercel.values.errors import InvariantError
from tiercel.values.ids import SeqId
from tiercel.values.plan import TableUpdate

_NO_PLACES = np.empty(0, np.int64)


class RowBook:
    """The row of every running sequence and the block table of every row, updated by deltas.

    Rows are assigned here, on the loop's thread; the sampler's part of a row is written on the lane.
    """

    def __init__(self, max_rows: int, max_blocks: int) -> None:
        self.row_by_seq: dict[SeqId, int] = {}
        self.tables: NDArray[np.int64] = np.zeros((max_rows, max_blocks), np.int64)  # 0 is the null block
        self._free = list(range(max_rows - 1, -1, -1))

    def release(self, seqs: Iterable[SeqId]) -> None:
        """Free the rows of sequences that hold no blocks any more. Sequences without a row are ignored."""
        for seq in seqs:
            row = self.row_by_seq.pop(seq, None)
            if row is not None:
                self._free.append(row)

    def update(self, updates: Iterable[TableUpdate]) -> list[SeqId]:
        """Write table deltas. Return the sequences that got a new row, whose sampler rows are to be filled."""
        fresh: list[SeqId] = []
        for update in updates:
            row = self.row_by_seq.get(update.seq)
            if row is None:
                if update.first != 0 or not self._free:
                    raise InvariantError("rows.update", seq=update.seq, first=update.first, free=len(self._free))
                row = self._free.pop()
                self.row_by_seq[update.seq] = row
                fresh.append(update.seq)
            self.tables[row, update.first : update.first + len(update.slots)] = update.slots
        return fresh

    def patches(self, updates: Iterable[TableUpdate]) -> Patches:
        """Return updates that were written as changes of the same tables elsewhere, with the slots that are here now.

        Equal places therefore have equal slots.
        """
        width = self.tables.shape[1]
        starts = [(self.row_by_seq[update.seq] * width + update.first, len(update.slots)) for update in updates]
        places = np.concatenate([np.arange(start, start + count) for start, count in starts] or [_NO_PLACES])
        return np.stack((places, self.tables.reshape(-1)[places]), axis=1)
