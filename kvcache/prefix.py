"""What a waiting sequence was found to have in reach, remembered from step to step."""

from array import array

import numpy as np

from tiercel.kvcache.pool import SlotPool
from tiercel.kvcache.slot_index import MIN_NUMPY_SLOTS, Slots, as_slots


class Prefix:
    """The leading blocks of a sequence that lie in the device tier or in DDR, and the slots they lie in.

    Every slot is remembered with its stamp. While stamps are what they were, nobody needs to look up a key again; a
    stamp that differs says which block to look up anew.
    """

    __slots__ = ("_all", "_is_load", "_seen", "_slots", "_stamps", "num_loads")

    def __init__(self) -> None:
        self.num_loads = 0  # of the blocks: in DDR alone
        self._slots = array("q")
        self._stamps = array("q")
        self._is_load = bytearray()
        self._all: tuple[Slots, slice | Slots] | None = None  # the slots as arrays, while they are what they were
        self._seen = (-1, -1)  # losses of the two pools when all stamps were last compared

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def slots(self) -> Slots:
        """The slots in the order of the blocks."""
        return self._arrays()[0]

    @property
    def index(self) -> slice | Slots:
        """The slots as an index: where they are one run a slice, which costs a tenth."""
        return self._arrays()[1]

    def _arrays(self) -> tuple[Slots, slice | Slots]:
        if self._all is None:
            slots = as_slots(self._slots)
            is_run = len(slots) > 0 and slots[-1] - slots[0] == len(slots) - 1 and bool((np.diff(slots) == 1).all())
            self._all = slots, slice(int(slots[0]), int(slots[-1]) + 1) if is_run else slots
        return self._all

    def loads(self) -> Slots:
        """Return the numbers of the blocks that lie in DDR alone."""
        return np.flatnonzero(np.frombuffer(bytes(self._is_load), np.uint8))

    def first_load(self) -> int:
        """Return the number of the first block that lies in DDR alone; the number of blocks if there is none."""
        first = self._is_load.find(1) if self.num_loads else -1
        return len(self) if first < 0 else first

    def changed(self, device: SlotPool, host: SlotPool | None) -> list[int]:
        """Return the numbers of the blocks to look up again, in order. Cost: numpy's alone."""
        if self._seen == self._losses(device, host):
            return []
        if len(self) < MIN_NUMPY_SLOTS:
            return [
                block
                for block, (slot, stamp) in enumerate(zip(self._slots, self._stamps, strict=True))
                if (host if self._is_load[block] and host is not None else device).stamp(slot) != stamp
            ]
        slots, stamps = self.slots, np.frombuffer(self._stamps, np.int64)
        if not self.num_loads or host is None:
            return np.flatnonzero(device.stamps[self.index] != stamps).tolist()
        loads = self.loads()
        now = device.stamps[np.where(np.frombuffer(bytes(self._is_load), bool), 0, slots)]
        now[loads] = host.stamps[slots[loads]]
        return np.flatnonzero(now != stamps).tolist()

    def compared(self, device: SlotPool, host: SlotPool | None) -> None:
        """Every block that had changed was looked up again."""
        self._seen = self._losses(device, host)

    def put(self, block: int, slot: int, stamp: int, *, is_load: bool) -> None:
        """Remember where a block lies: one that is known, or the next one."""
        self._all = None
        if block == len(self._slots):
            self._slots.append(slot)
            self._stamps.append(stamp)
            self._is_load.append(is_load)
        else:
            self.num_loads -= self._is_load[block]
            self._slots[block], self._stamps[block], self._is_load[block] = slot, stamp, is_load
        self.num_loads += is_load

    def extend(self, slots: Slots, stamps: Slots, *, is_load: bool = False) -> None:
        """Remember where the next blocks lie."""
        self._all = None
        self._slots.frombytes(slots.astype(np.int64).tobytes())
        self._stamps.frombytes(stamps.astype(np.int64).tobytes())
        self._is_load.extend(bytes([is_load]) * len(slots))
        self.num_loads += len(slots) if is_load else 0

    def cut(self, blocks: int) -> None:
        """Remember the first `blocks` blocks alone."""
        self._all = None
        del self._slots[blocks:], self._stamps[blocks:], self._is_load[blocks:]
        self.num_loads = self._is_load.count(1) if self.num_loads else 0

    @staticmethod
    def _losses(device: SlotPool, host: SlotPool | None) -> tuple[int, int]:
        return device.num_lost, 0 if host is None else host.num_lost
