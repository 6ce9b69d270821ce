"""Ranges of memory to copy, many at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Addresses = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Extents:
    """Copies without an order among themselves; no two may have overlapping targets.

    Shapes: sources, targets [n] addresses; sizes [n] bytes.
    """

    sources: Addresses
    targets: Addresses
    sizes: Addresses

    @classmethod
    def of_runs(cls, runs: Sequence[tuple[int, int, int]], source: int, target: int, slot_bytes: int) -> Self:
        """Return the copies of runs of slots between two arenas at the addresses `source` and `target`.

        A run is (first slot of the source, first slot of the target, number of slots).
        """
        slots = np.array(runs, dtype=np.uint64).reshape(-1, 3) * np.uint64(slot_bytes)
        return cls(slots[:, 0] + np.uint64(source), slots[:, 1] + np.uint64(target), slots[:, 2].copy())

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Iterate over (source, target, bytes)."""
        return iter(zip(self.sources.tolist(), self.targets.tolist(), self.sizes.tolist(), strict=True))

    def chosen(self, mask: NDArray[np.bool_]) -> "Extents":
        """Return the copies for which the mask is true."""
        return Extents(self.sources[mask], self.targets[mask], self.sizes[mask])
