"""The block tables of the runner's rows on the device."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Patches = NDArray[np.int64]
"""Changes of block tables. Shapes: [P, 2], the flat index of a place, and the slot for it."""

NO_PATCHES: Patches = np.empty((0, 2), np.int64)


class DeviceTables:
    """The block table of every row, changed by patches: a step sends what is new, not whole tables.

    Patches are sent with the arrays of the next nano-batch. Until then they are kept here, so that none is lost when a
    step fails before it has queued anything. All methods are called in jobs of one lane, in order.
    """

    def __init__(self, tables: Tensor) -> None:
        """Shapes: tables [rows, blocks] int64, contiguous."""
        self.tables = tables
        self._unsent: list[Patches] = []

    @classmethod
    def open(cls, rows: int, blocks: int, device: torch.device) -> "DeviceTables":
        """Allocate tables of null blocks."""
        return cls(torch.zeros(rows, blocks, dtype=torch.int64, device=device))

    @property
    def nbytes(self) -> int:
        """Bytes on the device; on the device `meta`, the bytes that they would take."""
        return self.tables.nbytes

    def note(self, patches: Patches) -> None:
        """Keep changes until they are sent."""
        if len(patches):
            self._unsent.append(patches)

    def unsent(self) -> Patches:
        """Return the changes to send. If a place occurs several times, it is with the same slot."""
        if len(self._unsent) > 1:
            newest_first = np.concatenate(self._unsent)[::-1]
            _, newest = np.unique(newest_first[:, 0], return_index=True)
            self._unsent = [newest_first[newest]]
        return self._unsent[0] if self._unsent else NO_PATCHES

    def mark_sent(self) -> None:
        """Forget the changes: work that writes them is queued."""
        self._unsent.clear()

    def apply(self, patches: Patches) -> None:
        """Write changes at once, on the CPU, and forget them."""
        self.tables.numpy().reshape(-1)[patches[:, 0]] = patches[:, 1]
        self.mark_sent()

    def gather_no_sync(self, rows: Tensor, blocks: int, out: Tensor | None = None) -> Tensor:
        """Return the first blocks of the tables of rows, in `out` or in a new tensor.

        Shapes: rows [S] int64 on the device; out and result [S, blocks] int64, any stride of rows.
        Cost:   one kernel, which reads memory of the device only.
        """
        return torch.index_select(self.tables[:, :blocks], 0, rows, out=out)
