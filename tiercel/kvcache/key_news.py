"""The announced block keys that have come into a cache or gone from it: what an engine tells the fronts of a fleet."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from tiercel.values.block_key import ANNOUNCED_BYTE, ANNOUNCED_ONE_IN, is_announced, key_head
from tiercel.values.ids import BlockKey, KeyHead

_HEAD_BYTES = 8


class KeyChanges(Struct, frozen=True):
    """Announced keys by their heads, each in one of the two."""

    stored: tuple[KeyHead, ...] = ()
    dropped: tuple[KeyHead, ...] = ()


class KeyNews:
    """The heads of the announced keys that any tier of an engine holds, and which of them the fronts know.

    The key indices of the tiers report every name given and lost. Changes that cancel out are never told.

    Memory: about 150 bytes for each announced key, one of eight.
    """

    def __init__(self) -> None:
        self._num_tiers: dict[KeyHead, int] = {}  # tiers that hold the key
        self._told: set[KeyHead] = set()
        self._changed: set[KeyHead] = set()

    @property
    def heads(self) -> frozenset[KeyHead]:
        """All heads, as of now: what a front that joins must hear, after which it hears the changes."""
        return frozenset(self._num_tiers)

    def take(self) -> KeyChanges:
        """Return the changes since the last call. Cost: O(changes)."""
        if not self._changed:
            return KeyChanges()
        held, told = self._num_tiers, self._told
        stored = tuple(head for head in self._changed if head in held and head not in told)
        dropped = tuple(head for head in self._changed if head in told and head not in held)
        told.update(stored)
        told.difference_update(dropped)
        self._changed.clear()
        return KeyChanges(stored, dropped)

    # ---- called by the key indices

    def note_named(self, key: BlockKey) -> None:
        """Note that a tier has got a block."""
        if is_announced(key):
            self._add(key_head(key))

    def note_lost(self, key: BlockKey) -> None:
        """Note that a tier has lost a block."""
        if is_announced(key):
            self._remove(key_head(key))

    def note_named_many(self, keys: npt.NDArray[np.uint8]) -> None:
        """Note that a tier has got blocks. Shape: keys [blocks, 32]. Cost: one call for each announced key."""
        for head in _announced(keys):
            self._add(head)

    def note_lost_many(self, keys: npt.NDArray[np.uint8]) -> None:
        """Note that a tier has lost blocks, as `note_named_many`."""
        for head in _announced(keys):
            self._remove(head)

    def _add(self, head: KeyHead) -> None:
        self._num_tiers[head] = self._num_tiers.get(head, 0) + 1
        self._changed.add(head)

    def _remove(self, head: KeyHead) -> None:
        self._num_tiers[head] -= 1
        if not self._num_tiers[head]:
            del self._num_tiers[head]
            self._changed.add(head)


def _announced(keys: npt.NDArray[np.uint8]) -> Iterable[KeyHead]:
    chosen = keys[keys[:, ANNOUNCED_BYTE] % ANNOUNCED_ONE_IN == 0, :_HEAD_BYTES]
    return map(KeyHead, np.ascontiguousarray(chosen).view("<u8").ravel().tolist())
