"""The prefix that a waiting sequence was found to have in reach, remembered from step to step."""

from array import array

import numpy as np

from tiercel.kvcache.pool import SlotPool
from tiercel.kvcache.slot_index import MIN_NUMPY_SLOTS, SlotIndex, Slots, as_slots


class Prefix:
    """The leading blocks of a sequence that lie in the device tier or in DDR, and their slots.

    Every slot is remembered with its stamp. While a stamp is the same its key need not be looked up again; a stamp that
    differs says which block to look up anew.
    """

    __slots__ = ("_index", "_is_load", "_num_changes_seen", "_slots", "_stamps", "num_loads")

    def __init__(self) -> None:
        self.num_loads = 0  # blocks that lie in DDR alone
        self._slots = array("q")
        self._stamps = array("q")
        self._is_load = bytearray()
        self._index: SlotIndex | None = None  # of all slots; None after a change
        self._num_changes_seen = (-1, -1)  # of the two pools, when all stamps were last compared

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def index(self) -> SlotIndex:
        """The slots in the order of the blocks."""
        if self._index is None:
            self._index = SlotIndex(as_slots(self._slots), is_kept=True)
        return self._index

    def loads(self) -> Slots:
        """Return the numbers of the blocks that lie in DDR alone."""
        return np.flatnonzero(np.frombuffer(bytes(self._is_load), np.uint8))

    def first_load(self) -> int:
        """Return the number of the first block that lies in DDR alone; the number of blocks if there is none."""
        first = self._is_load.find(1) if self.num_loads else -1
        return len(self) if first < 0 else first

    def changed(self, device: SlotPool, host: SlotPool | None) -> list[int]:
        """Return the numbers of the blocks to look up again, in order. Cost: a few calls of numpy."""
        if self._num_changes_seen == self._num_changes(device, host):
            return []
        if len(self) < MIN_NUMPY_SLOTS:
            return [
                block
                for block, (slot, stamp) in enumerate(zip(self._slots, self._stamps, strict=True))
                if (host if self._is_load[block] and host is not None else device).versions.stamp(slot) != stamp
            ]
        stamps = np.frombuffer(self._stamps, np.int64)
        if not self.num_loads or host is None:
            return np.flatnonzero(self.index.read(device.versions.stamps) != stamps).tolist()
        slots, loads = self.index.slots, self.loads()
        now = device.versions.stamps[np.where(np.frombuffer(bytes(self._is_load), bool), 0, slots)]
        now[loads] = host.versions.stamps[slots[loads]]
        return np.flatnonzero(now != stamps).tolist()

    def note_compared(self, device: SlotPool, host: SlotPool | None) -> None:
        """Note that every block that had changed was looked up again."""
        self._num_changes_seen = self._num_changes(device, host)

    def put(self, block: int, slot: int, stamp: int, *, is_load: bool) -> None:
        """Remember the slot of one block: a block that is known, or the next one."""
        self._index = None
        if block == len(self._slots):
            self._slots.append(slot)
            self._stamps.append(stamp)
            self._is_load.append(is_load)
        else:
            self.num_loads -= self._is_load[block]
            self._slots[block], self._stamps[block], self._is_load[block] = slot, stamp, is_load
        self.num_loads += is_load

    def extend(self, slots: Slots, stamps: Slots, *, is_load: bool = False) -> None:
        """Remember the slots of the next blocks."""
        self._index = None
        self._slots.frombytes(slots.astype(np.int64).tobytes())
        self._stamps.frombytes(stamps.astype(np.int64).tobytes())
        self._is_load.extend(bytes([is_load]) * len(slots))
        self.num_loads += len(slots) if is_load else 0

    def cut(self, blocks: int) -> None:
        """Forget all blocks but the first `blocks`."""
        self._index = None
        del self._slots[blocks:], self._stamps[blocks:], self._is_load[blocks:]
        self.num_loads = self._is_load.count(1) if self.num_loads else 0

    @staticmethod
    def _num_changes(device: SlotPool, host: SlotPool | None) -> tuple[int, int]:
        return device.versions.num_changes, 0 if host is None else host.versions.num_changes
