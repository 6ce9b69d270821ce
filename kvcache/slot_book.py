"""The arrays that say what each slot of a tier holds, and what becomes of a slot that nobody refers to."""

import enum
from array import array
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tiercel.errors import InvariantError
from tiercel.ids import BlockKey, SlotId
from tiercel.kvcache.eviction import RetentionClass, Segments
from tiercel.kvcache.free_run import FreeRunSearch
from tiercel.kvcache.key_index import KeyIndex
from tiercel.kvcache.reference_count import ReferenceCounts
from tiercel.kvcache.slot_index import MIN_NUMPY_SLOTS, SlotIndex, Slots, as_index, view

NULL_BLOCK = SlotId(0)
"""Padded rows write here. Never owned, never read for a result."""

PROTECTED_SHARE = 0.25
"""Of the cached copies, at most this part is REUSED: the rest is room in which a new copy can prove itself."""

CopyListener = Callable[[BlockKey, SlotId], None]
SlotsListener = Callable[[Slots], None]


class SlotState(enum.IntEnum):
    """FREE -> OWNED -> (LIMBO) -> FREE or CACHED; CACHED -> OWNED by a hit, CACHED -> FREE by eviction."""

    FREE = 0  # holds nothing
    OWNED = 1  # referenced by at least one table or flying transfer
    CACHED = 2  # unreferenced, holds a valid keyed copy: a hit or the next victim
    DEFERRED = 3  # unreferenced, but a launched step still touches it
    NULL = 4  # slot 0, the null block


_FREE, _OWNED, _CACHED, _DEFERRED, _NULL = (
    int(state) for state in SlotState
)  # plain integers: the loop compares often
_ONCE, _REUSED = int(RetentionClass.ONCE), int(RetentionClass.REUSED)


class SlotBook:
    """Struct of arrays over all slots of a tier, and the index from key to slot."""

    def __init__(self, blocks: int, *, protected_share: float = PROTECTED_SHARE) -> None:
        slots = blocks + 1
        self.blocks = blocks
        self.protected_share = protected_share
        # The states are the map of free slots too: a run of zeros is a run of free slots, found at the speed of C.
        self.states = bytearray(slots)
        self.states[NULL_BLOCK] = _NULL
        self._references = ReferenceCounts(slots)
        self.refs = self._references.totals  # of tables and transfers
        self.transfer_refs = self._references.transfers  # of transfers alone
        self.last_steps = array("q", bytes(8 * slots))  # last launched step that touches the slot, as of its release
        self.all_states, self.all_last_steps = view(self.states), view(self.last_steps)
        self.all_refs, self.all_transfer_refs = self._references.all_totals, self._references.all_transfers
        self.slot_by_key = KeyIndex(slots)
        self._stamps = array("q", bytes(8 * slots))
        # Counts up when a slot's copy goes or something about it changes in another tier: who remembers it looks again.
        self.stamps = view(self._stamps)
        self._lives = array("q", bytes(8 * slots))
        self.lives = view(self._lives)  # counts up only when a slot's copy goes: the same life is the same copy
        self.num_lost = 0  # copies that went: while this does not change, no stamp does
        self.committed = 0  # last committed step
        self.num_free: int = blocks
        self.num_deferred: int = 0
        # Called before a copy is evicted, while its retention class and owner are readable; must not change this pool.
        self.on_evict: CopyListener | None = None
        self.on_evict_many: SlotsListener | None = None  # called instead for many at once
        self.on_name: CopyListener | None = None  # called when a slot has got a name
        self.on_name_many: SlotsListener | None = None  # called instead for many at once
        self.on_free: Callable[[int], None] | None = None  # called when a slot becomes free or loses its name
        self.on_free_many: SlotsListener | None = None
        self.taken_slots = 0
        self.taken_runs = 0
        self.evictions = 0
        self._runs = FreeRunSearch(self.states, _OWNED)
        self._segments = Segments(slots)
        self.all_owners = self._segments.all_owners
        self._is_keyed = self.slot_by_key.is_named
        self._deferred_by_step: dict[int, list[SlotId | Slots]] = {}  # in order of release; of many at once a part

    # ---- facts

    @property
    def num_cached(self) -> int:
        return self._segments.count

    @property
    def num_owned(self) -> int:
        return self.blocks - self.num_free - self.num_cached - self.num_deferred

    @property
    def num_coming(self) -> int:
        """Slots that become free or cached by themselves: when steps commit and transfers land."""
        return self.num_deferred + self._references.num_lent

    @property
    def mean_run(self) -> float:
        """Slots per run of consecutive slots, over everything taken so far."""
        return self.taken_slots / max(self.taken_runs, 1)

    @property
    def floor_by_owner(self) -> dict[int, int]:
        """Copies that stay cached for an owner while anybody else's can go. The caller writes it."""
        return self._segments.floor_by_owner

    def key(self, slot: SlotId) -> BlockKey | None:
        """The key of the block in a slot; None while it is not committed, not full or not there."""
        return self.slot_by_key.key(slot)

    def is_touched(self, slot: SlotId, last_step: int) -> bool:
        """A launched, uncommitted step may still read or write the slot."""
        return max(self.last_steps[slot], last_step) > self.committed

    def retention(self, slot: SlotId) -> RetentionClass:
        """What its copy is or will be kept for."""
        return RetentionClass(self._segments.classes[slot])

    def are_retained(self, slots: Slots | SlotIndex, retention: RetentionClass) -> "npt.NDArray[np.bool_]":
        """Return for each slot whether its copy is or will be kept for this."""
        return as_index(slots).read(self._segments.all_classes) == retention

    def are_retained_beyond(self, slots: Slots, retention: RetentionClass) -> "npt.NDArray[np.bool_]":
        """Return for each slot whether its copy is kept for more than this."""
        return SlotIndex(slots).read(self._segments.all_classes) > retention

    def owners(self, slots: Slots | SlotIndex) -> Slots:
        """Return the owner of each slot's copy; 0 is nobody."""
        return as_index(slots).read(self.all_owners)

    def num_retained(self, retention: RetentionClass) -> int:
        """Cached copies kept for this."""
        return self._segments.counts[retention]

    def owner(self, slot: SlotId) -> int:
        """Whose copy it is; 0 is nobody's."""
        return self._segments.owners[slot]

    def num_cached_of_many(self, owners: Slots) -> Slots:
        """Return the number of cached copies of each owner."""
        counts = self._segments.owner_counts()
        return np.append(counts, 0)[np.minimum(owners, len(counts))]

    def num_cached_of(self, owner: int) -> int:
        """Cached copies of an owner."""
        return self._segments.count_of(owner)

    # ---- inside

    def _free(self, slot: SlotId) -> None:
        """An unreferenced slot is empty and nobody's."""
        self.states[slot] = _FREE
        self.num_free += 1
        self._segments.reset(slot)
        self._lose(slot)

    def _free_many(self, index: SlotIndex) -> None:
        """Unreferenced slots are empty and nobody's."""
        index.write(self.all_states, _FREE)
        self.num_free += len(index.slots)
        self._segments.reset_many(index)
        index.add(self.stamps, 1)
        index.add(self.lives, 1)
        self.num_lost += 1
        if self.on_free_many is not None:
            self.on_free_many(index.slots)

    def _lose(self, slot: int) -> None:
        """A slot has lost its copy: who remembers it must look again."""
        self._stamps[slot] += 1
        self._lives[slot] += 1
        self.num_lost += 1
        if self.on_free is not None:
            self.on_free(slot)

    def stamp(self, slot: int) -> int:
        """Return the stamp of one slot."""
        return self._stamps[slot]

    def change_stamp(self, slot: int) -> None:
        """Make all who remember this slot look again, as `change_stamps`."""
        self._stamps[slot] += 1
        self.num_lost += 1

    def change_stamps(self, slots: Slots | SlotIndex) -> None:
        """Make all who remember these slots look again: something about their copies has changed in another tier."""
        as_index(slots).add(self.stamps, 1)
        self.num_lost += 1

    def _evict(self, slots: Sequence[int]) -> None:
        segments, heard = self._segments, self.on_evict
        for slot in map(SlotId, slots):
            key = self.key(slot)
            if key is None:
                raise InvariantError("pool.cached_without_key", slot=slot)
            if heard is not None:
                heard(key, slot)
            self.slot_by_key.unname(slot)
            segments.remove(slot)
            self._free(slot)
        self.evictions += len(slots)

    def _evict_many(self, slots: Slots) -> None:
        if len(slots) < MIN_NUMPY_SLOTS or (self.on_evict is not None and self.on_evict_many is None):
            self._evict(slots.tolist())
            return
        index = SlotIndex(slots)
        if not index.read(self.slot_by_key.all_named).all():
            raise InvariantError("pool.cached_without_key", slots=slots[:8].tolist())
        if self.on_evict_many is not None:
            self.on_evict_many(slots)
        self.slot_by_key.unname_many(index)
        self._segments.remove_many(index)
        self._free_many(index)
        self.evictions += len(slots)

    def _settle_many(self, index: SlotIndex) -> None:
        """Cache the copies that slots without references hold, and free the other slots."""
        is_keyed = index.read(self.slot_by_key.all_named) > 0
        cached = index.filter(is_keyed)
        cached.write(self.all_states, _CACHED)
        self._segments.add_many(cached)
        if len(cached) < len(index):
            self._free_many(index.filter(~is_keyed))

    # ---- tests

    @staticmethod
    def _flat(parts: "Sequence[SlotId | Slots]") -> list[int]:
        """The slots of a step's limbo in order."""
        return [slot for part in parts for slot in (part.tolist() if isinstance(part, np.ndarray) else [part])]

    def eviction_order(self) -> tuple[int, ...]:
        """Cached slots, first victim first, floors aside."""
        return tuple(self._segments)

    def free_order(self) -> tuple[int, ...]:
        """Free slots, the next single one taken first."""
        free = [slot for slot in range(1, self.blocks + 1) if self.states[slot] == _FREE]
        return tuple(sorted(free, key=lambda slot: (slot < self._runs.cursor, slot)))

    def snapshot(self) -> object:
        """All of it in comparable form."""
        return (
            bytes(self.states),
            *(counts.tolist() for counts in (self.refs, self.transfer_refs, self.last_steps)),
            dict(self.slot_by_key),
            [self.key(SlotId(slot)) for slot in range(self.blocks + 1)],
            {step: self._flat(parts) for step, parts in self._deferred_by_step.items()},
            self._segments.snapshot(),
            (self.committed, self._runs.cursor, self.num_free, self.num_deferred, self._references.num_lent),
        )

    def check_integrity(self) -> None:
        """Every slot in exactly one state, sums constant, index, keys and lists agree. Errors: InvariantError."""
        segments = self._segments
        if not segments.check():
            raise InvariantError("pool.segments", counts=tuple(segments.counts), count=segments.count)
        cached = set(segments)
        deferred = {slot for parts in self._deferred_by_step.values() for slot in self._flat(parts)}
        num_free = num_deferred = num_lent = 0
        for slot in range(1, self.blocks + 1):
            state, refs, key = self.states[slot], self.refs[slot], self.key(SlotId(slot))
            lent = self.transfer_refs[slot]
            num_free += state == _FREE
            num_deferred += state == _DEFERRED
            num_lent += 0 < lent == refs
            is_right = (
                state != _NULL
                and (state == _CACHED) == (slot in cached)
                and (state != _DEFERRED or slot in deferred)
                and (state == _OWNED) == (refs > 0)
                and refs >= lent >= 0
                and (state != _FREE or (key is None and segments.classes[slot] == _ONCE and not segments.owners[slot]))
                and (state != _CACHED or key is not None)
                and (key is None or self.slot_by_key.get(key) == slot)
            )
            if not is_right:
                raise InvariantError("pool.slot", slot=slot, state=SlotState(state).name, refs=refs, lent=lent, key=key)
        if (num_free, num_deferred, num_lent) != (self.num_free, self.num_deferred, self._references.num_lent):
            raise InvariantError(
                "pool.sums", free=self.num_free, deferred=self.num_deferred, lent=self._references.num_lent
            )
        if len(cached) != self.num_cached or len(self.slot_by_key) != sum(self._is_keyed):
            raise InvariantError("pool.keys", cached=self.num_cached, keys=len(self.slot_by_key))
        if self.states[NULL_BLOCK] != _NULL or self.refs[NULL_BLOCK]:
            raise InvariantError("pool.null_block")
