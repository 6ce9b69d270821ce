"""The states of a slot, and the slot that is never used for a block."""

import enum

from tiercel.values.ids import SlotId

NULL_BLOCK = SlotId(0)
"""Padded rows write to this slot. It is never owned, and never read for a result."""


class SlotState(enum.IntEnum):
    """FREE -> OWNED -> (DEFERRED) -> FREE or CACHED; CACHED -> OWNED by a hit, CACHED -> FREE by eviction."""

    FREE = 0  # holds nothing
    OWNED = 1  # referenced by at least one table or flying transfer
    CACHED = 2  # unreferenced, holds a valid keyed copy: the next request may hit it, or it is evicted
    DEFERRED = 3  # unreferenced, but its free is deferred: a launched step still touches it
    NULL = 4  # slot 0, the null block
