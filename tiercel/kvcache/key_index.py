"""An index of the named blocks of a tier, from key to slot and back."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tiercel.kvcache.key_news import KeyNews
from tiercel.kvcache.slot_index import MIN_NUMPY_SLOTS, SlotIndex, Slots, view
from tiercel.values.ids import BlockKey, SlotId

KEY_BYTES = 32

_KEYS_PER_PART = 512  # of slots that lost their names at once; removing a part costs about 0.5 ms


class KeyIndex(Mapping[BlockKey, SlotId]):
    """The slot of every named block of a tier. The SlotPool writes it.

    Many slots can lose their names at once. Their keys stay in the map and are not found any more, because every slot
    has its own name too, against which the map is checked. `tidy` removes such keys a part at a time.
    """

    def __init__(self, slots: int) -> None:
        self._slot_by_key: dict[BlockKey, SlotId] = {}
        # Bytes, not objects: the garbage collector has nothing to visit here, however many blocks there are.
        self._keys = bytearray(KEY_BYTES * slots)
        self.is_named = bytearray(slots)  # by slot
        self.all_named = view(self.is_named)
        self._all_keys: npt.NDArray[np.uint8] = view(self._keys).reshape(slots, KEY_BYTES)
        self._num_named = 0
        self._lost: deque[tuple[npt.NDArray[np.uint8], Slots]] = deque()  # names that the map may still hold
        self._news: KeyNews | None = None

    def __len__(self) -> int:
        return self._num_named

    def __iter__(self) -> Iterator[BlockKey]:
        return (key for key, slot in self._slot_by_key.items() if self._is_named(slot, key))

    def __getitem__(self, key: BlockKey) -> SlotId:
        slot = self.get(key)
        if slot is None:
            raise KeyError(key)
        return slot

    def __contains__(self, key: object) -> bool:
        slot = self._slot_by_key.get(key)  # pyright: ignore[reportArgumentType, reportCallIssue]
        return slot is not None and (not self._lost or self._is_named(slot, key))

    def get(self, key: BlockKey, default: None = None) -> SlotId | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the slot of a block; None if the tier does not hold the block."""
        slot = self._slot_by_key.get(key)
        return slot if slot is None or not self._lost or self._is_named(slot, key) else None

    def find(self, keys: Sequence[BlockKey]) -> Slots:
        """Return the slots of these blocks, up to the first block that the tier does not hold."""
        look_up = self.get if self._lost else self._slot_by_key.get
        found = list(map(look_up, keys))
        return np.array(found[: found.index(None)] if None in found else found, np.intp)

    def key(self, slot: int) -> BlockKey | None:
        """Return the key of the block in a slot; None if the slot has no name."""
        if not self.is_named[slot]:
            return None
        return BlockKey(bytes(self._keys[KEY_BYTES * slot : KEY_BYTES * (slot + 1)]))

    # ---- changes

    def tell(self, news: KeyNews) -> None:
        """Tell of all names that there are, and from now on of every name given or lost."""
        self._news = news
        for key in self:
            news.note_named(key)

    def name(self, slot: SlotId, key: BlockKey) -> SlotId:
        """Name a slot. Return the slot, or the slot that has the name already; then nothing changes."""
        known = self.get(key)
        if known is not None:
            return known
        self._slot_by_key[key] = slot
        self._keys[KEY_BYTES * slot : KEY_BYTES * (slot + 1)] = key
        self.is_named[slot] = True
        self._num_named += 1
        if self._news is not None:
            self._news.note_named(key)
        return slot

    def name_many(self, slots: Slots, keys: Sequence[BlockKey]) -> "npt.NDArray[np.bool_]":
        """Name slots. Return for each whether it got its name; False if another slot has that name."""
        known = list(map(self._slot_by_key.get, keys))
        is_new = np.ones(len(keys), bool)
        if known.count(None) < len(keys):
            pairs = zip(known, keys, strict=True)
            is_new[:] = [slot is None or not self._is_named(slot, key) for slot, key in pairs]
        if not is_new.all():
            slots, keys = slots[is_new], [key for key, new in zip(keys, is_new.tolist(), strict=True) if new]
        if len(slots):
            self._slot_by_key.update(zip(keys, slots.tolist(), strict=True))
            index, rows = SlotIndex(slots), np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)
            if self._news is not None:
                self._news.note_named_many(rows)
            index.write(self._all_keys, rows)
            index.write(self.all_named, 1)
            self._num_named += len(slots)
        return is_new

    def unname(self, slot: int) -> None:
        """Remove the name of a slot, if it has one."""
        key = self.key(slot)
        if key is not None:
            del self._slot_by_key[key]
            self.is_named[slot] = False
            self._num_named -= 1
            if self._news is not None:
                self._news.note_lost(key)

    def unname_many(self, index: SlotIndex) -> None:
        """Remove the names of slots that have one. Cost: a few calls of numpy; `tidy` removes the keys later."""
        slots = index.slots
        if len(slots) < MIN_NUMPY_SLOTS:
            for slot in slots.tolist():
                self.unname(slot)
            return
        keys = index.read(self._all_keys)
        if self._news is not None:
            self._news.note_lost_many(keys)
        for first in range(0, len(slots), _KEYS_PER_PART):
            part = slice(first, first + _KEYS_PER_PART)
            self._lost.append((keys[part], slots[part]))
        index.write(self.all_named, 0)
        self._num_named -= len(slots)

    def tidy(self) -> None:
        """Remove some of the keys whose slots have lost their names from the map."""
        for _ in range(1 + len(self._lost) // 64):
            if not self._lost:
                return
            keys, slots = self._lost.popleft()
            for key, slot in zip(keys.view(f"V{KEY_BYTES}").ravel().tolist(), slots.tolist(), strict=True):
                if self._slot_by_key.get(key) == slot and not self._is_named(slot, key):
                    del self._slot_by_key[key]

    def _is_named(self, slot: int, key: object) -> bool:
        return bool(self.is_named[slot]) and self._keys[KEY_BYTES * slot : KEY_BYTES * (slot + 1)] == key
