"""The slots of one tier: who holds them and when they may be used again."""

import enum
from array import array
from collections.abc import Callable

from kvcache.policy import LeastRecent
from tiercel.errors import InvariantError
from tiercel.ids import BlockKey, SlotId

SINK = SlotId(0)
"""Padded rows write here. Never owned, never read for a result."""

KEY_BYTES = 32

Undo = Callable[[], object]


class SlotState(enum.IntEnum):
    """FREE -> OWNED -> (LIMBO) -> FREE or CACHED; CACHED -> OWNED by a hit, CACHED -> FREE by eviction."""

    FREE = 0  # holds nothing
    OWNED = 1  # referenced by at least one table
    CACHED = 2  # unreferenced, holds a valid keyed copy: a hit or the next victim
    LIMBO = 3  # unreferenced, but a launched step still touches it
    SINK = 4


class SlotPool:
    """Struct of arrays over all slots of a tier, and the index from key to slot.

    Every method that seals a plan (`take`, `hold`, `drop`) appends its exact inverse to `journal`.
    """

    def __init__(self, blocks: int) -> None:
        slots = blocks + 1
        self.blocks = blocks
        self.states = bytearray(slots)
        self.states[SINK] = SlotState.SINK
        self.refs = array("i", bytes(4 * slots))
        self.last_steps = array("q", bytes(8 * slots))  # last launched step that touches the slot, as of its release
        self.slot_by_key: dict[BlockKey, SlotId] = {}
        self.journal: list[Undo] = []
        self.committed = 0  # last committed step
        self.num_limbo = 0
        # A stack whose top is the lowest slot: fresh tables get runs of consecutive slots.
        self._free = array("i", range(blocks, 0, -1))
        self._cached = LeastRecent(slots)
        # Bytes, not objects: a collection has nothing to visit here, whatever the number of blocks.
        self._keys = bytearray(KEY_BYTES * slots)
        self._is_keyed = bytearray(slots)
        self._limbo_by_step: dict[int, list[SlotId]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_owned(self) -> int:
        return self.blocks - self.num_free - self.num_cached - self.num_limbo

    def key(self, slot: SlotId) -> BlockKey | None:
        """The key of the block in a slot; None while it is not committed, not full or not there."""
        return BlockKey(bytes(self._keys[KEY_BYTES * slot : KEY_BYTES * (slot + 1)])) if self._is_keyed[slot] else None

    def is_touched(self, slot: SlotId, last_step: int) -> bool:
        """A launched, uncommitted step may still read or write the slot."""
        return max(self.last_steps[slot], last_step) > self.committed

    def take(self) -> SlotId:
        """Own an empty slot; evicts the least recent cached copy when none is free.

        Errors: InvariantError when nothing is free or cached: the plan promised too much.
        """
        if self._free:
            slot = SlotId(self._free.pop())
            self.journal.append(lambda: self._free.append(slot))
        else:
            slot = self._evict()
        self.states[slot] = SlotState.OWNED
        self.refs[slot] = 1
        self.journal.append(lambda: self._unown(slot, SlotState.FREE))
        return slot

    def hold(self, slot: SlotId) -> None:
        """One more reference to a slot with a valid copy (a prefix hit)."""
        state = SlotState(self.states[slot])
        match state:
            case SlotState.OWNED:
                self.refs[slot] += 1
                self.journal.append(lambda: self._lower(slot))
            case SlotState.CACHED:
                place = self._cached.remove(slot)
                self._own(slot)
                self.journal.append(lambda: (self._unown(slot, state), self._cached.restore(slot, place)))
            case SlotState.LIMBO:  # still valid: a keyed block is never written again
                self.num_limbo -= 1
                self._own(slot)
                self.journal.append(lambda: (self._unown(slot, state), self._count_limbo(1)))
            case SlotState.FREE | SlotState.SINK:
                raise InvariantError("pool.hold_empty", slot=slot, state=state.name)

    def drop(self, slot: SlotId, last_step: int) -> None:
        """One reference less. The last one frees the slot, caches its copy, or sends it to limbo first."""
        if self.refs[slot] <= 0:
            raise InvariantError("pool.double_free", slot=slot)
        before = self.last_steps[slot]
        self.last_steps[slot] = max(before, last_step)
        self.refs[slot] -= 1
        self.journal.append(lambda: self._reown(slot, before))
        if self.refs[slot] > 0:
            return
        if self.last_steps[slot] > self.committed:
            self.states[slot] = SlotState.LIMBO
            self._limbo_by_step.setdefault(self.last_steps[slot], []).append(slot)
            self._count_limbo(1)
            self.journal.append(lambda: self._count_limbo(-1))
        else:
            self.journal.append(self._settle(slot))

    def publish(self, slot: SlotId, key: BlockKey) -> SlotId:
        """Name a committed full block. Returns the canonical slot: another one if the key is already here."""
        canonical = self.slot_by_key.setdefault(key, slot)
        if canonical == slot:
            self._keys[KEY_BYTES * slot : KEY_BYTES * (slot + 1)] = key
            self._is_keyed[slot] = True
        return canonical

    def commit(self, step: int) -> None:
        """Launched steps up to `step` touch nothing any more: their limbo slots settle."""
        self.committed = step
        for launched in [launched for launched in self._limbo_by_step if launched <= step]:
            for slot in self._limbo_by_step.pop(launched):
                # A slot that was hit meanwhile left limbo, one released again is listed under a later step.
                if self.states[slot] == SlotState.LIMBO and self.last_steps[slot] <= step:
                    self._count_limbo(-1)
                    self._settle(slot)

    def undo(self) -> None:
        """Take back everything since the journal was cleared, newest first."""
        while self.journal:
            self.journal.pop()()

    def _settle(self, slot: SlotId) -> Undo:
        if not self._is_keyed[slot]:
            self.states[slot] = SlotState.FREE
            self._free.append(slot)
            return self._free.pop
        self.states[slot] = SlotState.CACHED
        self._cached.add(slot)
        return lambda: self._cached.remove(slot)

    def _evict(self) -> SlotId:
        victim = self._cached.first
        if victim is None:
            raise InvariantError("pool.exhausted", blocks=self.blocks)
        slot = SlotId(victim)
        key = self.key(slot)
        if key is None:
            raise InvariantError("pool.cached_without_key", slot=slot)
        place = self._cached.remove(slot)
        del self.slot_by_key[key]
        self._is_keyed[slot] = False
        self.journal.append(lambda: self._unevict(slot, key, place))
        return slot

    def _unevict(self, slot: SlotId, key: BlockKey, place: int) -> None:
        self._keys[KEY_BYTES * slot : KEY_BYTES * (slot + 1)] = key
        self._is_keyed[slot] = True
        self.slot_by_key[key] = slot
        self.states[slot] = SlotState.CACHED
        self._cached.restore(slot, place)

    def _own(self, slot: SlotId) -> None:
        self.states[slot] = SlotState.OWNED
        self.refs[slot] = 1

    def _unown(self, slot: SlotId, state: SlotState) -> None:
        self.states[slot] = state
        self.refs[slot] = 0

    def _lower(self, slot: SlotId) -> None:
        self.refs[slot] -= 1

    def _reown(self, slot: SlotId, last_step: int) -> None:
        self.states[slot] = SlotState.OWNED
        self.refs[slot] += 1
        self.last_steps[slot] = last_step

    def _count_limbo(self, change: int) -> None:
        self.num_limbo += change

    def eviction_order(self) -> tuple[int, ...]:
        """Cached slots, first victim first."""
        return tuple(self._cached)

    def free_order(self) -> tuple[int, ...]:
        """Free slots, the next one taken first."""
        return tuple(reversed(self._free))

    def check_integrity(self) -> None:
        """Every slot in exactly one state, sums constant, index and keys agree. Errors: InvariantError."""
        free, cached = set(self._free), set(self._cached)
        if len(free) != len(self._free):
            raise InvariantError("pool.free_twice")
        limbo = {slot for slots in self._limbo_by_step.values() for slot in slots}
        num_limbo = 0
        for slot in range(1, self.blocks + 1):
            state, refs, key = SlotState(self.states[slot]), self.refs[slot], self.key(SlotId(slot))
            num_limbo += state is SlotState.LIMBO
            is_right = (
                (state is SlotState.FREE) == (slot in free)
                and (state is SlotState.CACHED) == (slot in cached)
                and (state is not SlotState.LIMBO or slot in limbo)
                and (state is SlotState.OWNED) == (refs > 0)
                and refs >= 0
                and (state is not SlotState.FREE or key is None)
                and (state is not SlotState.CACHED or key is not None)
                and (key is None or self.slot_by_key.get(key) == slot)
            )
            if not is_right:
                raise InvariantError("pool.slot", slot=slot, state=state.name, refs=refs, keyed=key is not None)
        if num_limbo != self.num_limbo or len(self.slot_by_key) != sum(self._is_keyed):
            raise InvariantError("pool.sums", limbo=self.num_limbo, counted=num_limbo, keys=len(self.slot_by_key))
        if self.states[SINK] != SlotState.SINK or self.refs[SINK]:
            raise InvariantError("pool.sink")
