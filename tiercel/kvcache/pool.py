"""The slots of one tier: references to them, their content, and when they may be used again."""

from collections.abc import Callable, Sequence

import numpy as np

from tiercel.kvcache.deferred_free import DeferredFrees
from tiercel.kvcache.eviction import CopyBook, RetentionClass
from tiercel.kvcache.free_run import FreeRunSearch
from tiercel.kvcache.key_index import KeyIndex
from tiercel.kvcache.reference_count import ReferenceCounts
from tiercel.kvcache.slot_index import MIN_NUMPY_SLOTS, SlotIndex, Slots, as_index, as_slots, view
from tiercel.kvcache.slot_state import NULL_BLOCK, SlotState
from tiercel.kvcache.slot_version import SlotVersions
from tiercel.kvcache.victim import VictimSearch
from tiercel.values.errors import InvariantError
from tiercel.values.ids import BlockKey, SlotId

PROTECTED_SHARE = 0.25
"""At most this share of the cached copies is REUSED: the rest is room in which a new copy can prove itself."""

_MAX_DEMOTED = 256  # copies, by one commit
_MIN_SCANNED = 1024  # for more slots, one look at the whole pool finds the largest free runs
# Plain integers: the engine loop compares them often.
_FREE, _OWNED, _CACHED, _DEFERRED, _NULL = (int(state) for state in SlotState)
_ONCE = int(RetentionClass.ONCE)

CopyListener = Callable[[BlockKey, SlotId], None]
SlotsListener = Callable[[Slots], None]


class SlotPool:
    """The moves of the slots of one tier between their states, and the books of the tier.

    The pool is the only writer of the states, references, keys, versions and deferred frees. The retention classes and
    owners of copies are set through `copies`, the floors of owners through `victims`.
    """

    def __init__(self, blocks: int, *, protected_share: float = PROTECTED_SHARE) -> None:
        slots = blocks + 1
        self.blocks = blocks
        self.protected_share = protected_share
        # The states are the map of free slots too: a run of zeros is a run of free slots, found at the speed of C.
        self.states = bytearray(slots)
        self.states[NULL_BLOCK] = _NULL
        self.all_states = view(self.states)
        self.slot_by_key = KeyIndex(slots)
        self.copies = CopyBook(self.all_states)
        self.victims = VictimSearch(self.copies)
        self.versions = SlotVersions(slots)
        self.deferred = DeferredFrees(self.all_states)
        self._references = ReferenceCounts(slots)
        self.refs = self._references.totals  # of tables and transfers
        self.transfer_refs = self._references.transfers  # of transfers alone
        self.all_refs, self.all_transfer_refs = self._references.all_totals, self._references.all_transfers
        self.num_free: int = blocks
        # Called before a copy is evicted, while its class and owner are readable; must not change this pool.
        self.on_evict: CopyListener | None = None
        self.on_evict_many: SlotsListener | None = None  # called instead for many at once
        self.on_name: CopyListener | None = None  # called when a slot has got a name
        self.on_name_many: SlotsListener | None = None  # called instead for many at once
        self.on_free: Callable[[int], None] | None = None  # called when a slot becomes free or loses its name
        self.on_free_many: SlotsListener | None = None  # called instead for many at once
        self.evictions = 0
        self.taken_slots = 0
        self.taken_runs = 0
        self._runs = FreeRunSearch(self.states, _OWNED)
        self._is_keyed = self.slot_by_key.is_named

    # ---- facts

    @property
    def num_cached(self) -> int:
        """Slots that hold an unreferenced copy."""
        return self.copies.count

    @property
    def num_owned(self) -> int:
        """Slots to which a table or a flying transfer refers."""
        return self.blocks - self.num_free - self.num_cached - self.num_deferred

    @property
    def num_deferred(self) -> int:
        """Slots whose free is deferred."""
        return self.deferred.count

    @property
    def num_coming(self) -> int:
        """Slots that become free or cached by themselves: when steps commit and transfers land."""
        return self.deferred.count + self._references.num_lent

    @property
    def mean_run(self) -> float:
        """Slots per run of consecutive slots, over everything taken so far."""
        return self.taken_slots / max(self.taken_runs, 1)

    def key(self, slot: SlotId) -> BlockKey | None:
        """Return the key of the block in a slot; None if the slot holds no committed full block."""
        return self.slot_by_key.key(slot)

    # ---- taking empty slots

    def take(self) -> SlotId:
        """Own an empty slot; evicts a cached copy if none is free. Errors: as `take_many`."""
        return self.take_many(1)[0]

    def take_many(
        self, count: int, near: SlotId | None = None, headroom: int = 0, *, by_transfer: bool = False
    ) -> list[SlotId]:
        """Own `count` empty slots with one reference each, in as few runs of consecutive slots as possible.

        First come the slots that directly continue `near`, the last slot of the table; then a run with `headroom` more
        slots, which stay free so that the sequence can grow in place; then the largest runs. Cached copies are evicted
        before anything is placed, as many as are missing.
        Errors: InvariantError if too few slots are free or cached: the plan promised too much. Nothing is changed then.
        """
        if count >= MIN_NUMPY_SLOTS:
            return self.take_slots(count, near, headroom, by_transfer=by_transfer).tolist()
        missing = self._check_room(count)
        if missing < 0:
            found = self._runs.take(count, near, headroom)
        else:  # every free slot is needed, and some of the cached
            slots = self._runs.all() if self.num_free else []
            if missing:
                victims = self.victims.choose(missing)
                self._evict(victims)
                slots += victims
            found = self._runs.take_these(slots, near)
        self._references.own_runs(found, by_transfer)
        self.num_free -= count
        self.taken_slots += count
        self.taken_runs += len(found) - (near is not None and bool(found) and found[0][0] == near + 1)
        return [SlotId(slot) for first, length in found for slot in range(first, first + length)]

    def take_slots(
        self, count: int, near: SlotId | None = None, headroom: int = 0, *, by_transfer: bool = False
    ) -> Slots:
        """Do the same as `take_many`, and return an array."""
        return self.take_index(count, near, headroom, by_transfer=by_transfer).slots

    def take_index(
        self, count: int, near: SlotId | None = None, headroom: int = 0, *, by_transfer: bool = False
    ) -> SlotIndex:
        """Do the same as `take_many`, and return an index."""
        if count < MIN_NUMPY_SLOTS:
            return SlotIndex(as_slots(self.take_many(count, near, headroom, by_transfer=by_transfer)))
        missing = self._check_room(count)
        if missing >= 0:  # every free slot is needed, and some of the cached
            slots = self._runs.every()
            if missing:
                victims = self.victims.choose_many(missing)
                self._evict_many(victims)
                slots = np.concatenate([slots, victims])
            index = SlotIndex(self._runs.take_all(slots, near))
        elif count < _MIN_SCANNED:
            found = self._runs.take(count, near, headroom)
            index = SlotIndex(np.concatenate([np.arange(first, first + length) for first, length in found]))
        else:
            index = SlotIndex(self._runs.take_many(count, near, headroom))
        slots = index.slots
        self._references.own_many(index, by_transfer)
        self.num_free -= count
        self.taken_slots += count
        is_continued = near is not None and int(slots[0]) == near + 1  # as numbers of Python, so that the sum stays one
        self.taken_runs += 1 + int(np.count_nonzero(np.diff(slots) != 1)) - is_continued
        return index

    def take_at(self, slot: SlotId, *, by_transfer: bool = False) -> bool:
        """Own this slot, which held a copy before the start. Return False if the slot is not free."""
        if not 0 < slot <= self.blocks or self.states[slot] != _FREE:
            return False
        self._references.own_runs(self._runs.take_these([slot], None), by_transfer)
        self.num_free -= 1
        return True

    def adopt(self, slot: SlotId, key: BlockKey) -> bool:
        """Cache a block that a free slot is said to hold. Return False if the slot is taken or the block known."""
        if key in self.slot_by_key or not self.take_at(slot):
            return False
        self.publish(slot, key)
        self.drop(slot, 0)
        return True

    def _check_room(self, count: int) -> int:
        """Return how many free slots are missing for `count`; 0 or more: all free slots are needed."""
        missing = count - self.num_free
        if missing > self.copies.count:
            raise InvariantError("pool.exhausted", blocks=self.blocks, wanted=count, missing=missing)
        return missing

    # ---- references

    def hold(self, slot: SlotId, *, by_transfer: bool = False, is_reuse: bool = True) -> None:
        """Add a reference: of a table to a block that is here (a prefix hit), or of a transfer.

        A table's hit makes a copy that was seen once a reused one, unless `is_reuse` is false.
        Errors: InvariantError for an empty slot.
        """
        state = self.states[slot]
        if state == _CACHED:
            self.copies.remove(slot)
        elif state == _DEFERRED:  # still valid: a keyed block is never written again
            self.deferred.remove()
        elif state != _OWNED:
            raise InvariantError("pool.hold_empty", slot=slot, state=SlotState(state).name)
        self.states[slot] = _OWNED
        self._references.change(slot, 1, by_transfer)
        if is_reuse and not by_transfer and self._is_keyed[slot] and self.copies.classes[slot] == _ONCE:
            self.copies.mark_reused(slot)

    def drop(self, slot: SlotId, last_step: int, *, by_transfer: bool = False) -> None:
        """Remove a reference. Without references the slot's copy is cached, or the slot is free.

        That is deferred as long as launched steps up to `last_step` touch the slot.
        Errors: InvariantError if there is no such reference.
        """
        refs, lent = self.refs[slot], self.transfer_refs[slot]
        if (lent if by_transfer else refs - lent) <= 0:
            raise InvariantError("pool.double_free", slot=slot, refs=refs, by_transfers=lent, by_transfer=by_transfer)
        last_step = self.deferred.note_step(slot, last_step)
        self._references.change(slot, -1, by_transfer)
        if refs > 1:
            return
        if last_step > self.deferred.committed:
            self.states[slot] = _DEFERRED
            self.deferred.add(slot, last_step)
        else:
            self._settle(slot)

    def hold_many(self, slots: Slots | SlotIndex, *, by_transfer: bool = False, is_reuse: bool = True) -> None:
        """Add one reference to each of these slots, as `hold`. Errors: as there; no slot is changed then."""
        index = as_index(slots)
        slots = index.slots
        if len(slots) < MIN_NUMPY_SLOTS:
            for slot in slots.tolist():
                self.hold(slot, by_transfer=by_transfer, is_reuse=is_reuse)
            return
        states = index.read(self.all_states)
        is_cached, is_deferred = states == _CACHED, states == _DEFERRED
        if not (is_cached | is_deferred | (states == _OWNED)).all():
            raise InvariantError("pool.hold_empty", slots=slots[:8].tolist())
        cached = index.filter(is_cached)
        if len(cached.slots):
            self.copies.remove_many(cached)
        self.deferred.remove(int(np.count_nonzero(is_deferred)))
        index.write(self.all_states, _OWNED)
        self._references.change_many(index, 1, by_transfer)
        if is_reuse and not by_transfer:
            self.copies.mark_reused_many(index.filter(index.read(self.slot_by_key.all_named) > 0))

    def drop_many(self, slots: Slots | SlotIndex, last_step: int, *, by_transfer: bool = False) -> None:
        """Remove one reference from each of these slots, in this order, as `drop`. Errors: as there."""
        index = as_index(slots)
        slots = index.slots
        if len(slots) < MIN_NUMPY_SLOTS:
            for slot in slots.tolist():
                self.drop(slot, last_step, by_transfer=by_transfer)
            return
        refs, lent = index.read(self.all_refs), index.read(self.all_transfer_refs)
        if ((lent if by_transfer else refs - lent) <= 0).any():
            raise InvariantError("pool.double_free", slots=slots[:8].tolist(), by_transfer=by_transfer)
        last_steps = self.deferred.note_step_many(index, last_step)
        self._references.change_many(index, -1, by_transfer)
        is_last = refs == 1
        if not is_last.all():
            index, last_steps = index.filter(is_last), last_steps[is_last]
        is_touched = last_steps > self.deferred.committed
        if is_touched.any():
            touched = index.filter(is_touched)
            touched.write(self.all_states, _DEFERRED)
            self.deferred.add_many(touched.slots, last_steps[is_touched])
            index = index.filter(~is_touched)
        self._settle_many(index)

    def discard(self, slot: SlotId) -> None:
        """Free a slot whose only reference is the caller's and whose content is worthless: a failed target.

        Errors: InvariantError if the slot is in another state.
        """
        if self.states[slot] != _OWNED or self.refs[slot] != 1 or self._is_keyed[slot]:
            state = SlotState(self.states[slot]).name
            raise InvariantError("pool.discard", slot=slot, state=state, refs=self.refs[slot], key=self._is_keyed[slot])
        self.drop(slot, 0, by_transfer=self.transfer_refs[slot] == 1)

    def commit(self, step: int) -> None:
        """Note that launched steps up to `step` touch nothing any more, and carry out the frees deferred for them."""
        for part in self.deferred.settle(step):
            if isinstance(part, SlotIndex):
                self._settle_many(part)
            else:
                self._settle(part)
        self.balance()
        self.slot_by_key.tidy()

    def balance(self, maximum: int = _MAX_DEMOTED) -> int:
        """Hold REUSED to its share of the copies: the oldest beyond it count as seen once. Return how many."""
        return self.copies.demote(self.protected_share, maximum)

    # ---- named copies

    def publish(self, slot: SlotId, key: BlockKey) -> SlotId:
        """Name a committed full block. Return the canonical slot: another one if the key is already here."""
        is_named = self._is_keyed[slot]
        canonical = self.slot_by_key.name(slot, key)
        if canonical == slot and not is_named and self.on_name is not None:
            self.on_name(key, slot)
        return canonical

    def publish_many(self, slots: Slots, keys: Sequence[BlockKey]) -> Slots:
        """Name committed full blocks, none of which has a name. Return the slots whose keys were here already."""
        is_new = self.slot_by_key.name_many(slots, keys)
        named = slots if is_new.all() else slots[is_new]
        if self.on_name_many is not None and len(named):
            self.on_name_many(named)
        return slots[~is_new]

    def forget(self, slot: SlotId) -> None:
        """Take the key from an owned copy that proved not to be what its key says. Its references stay.

        Errors: InvariantError if the slot is not owned or has no key.
        """
        key = self.key(slot)
        if key is None or self.states[slot] != _OWNED:
            raise InvariantError("pool.forget", slot=slot, state=SlotState(self.states[slot]).name)
        self.slot_by_key.unname(slot)
        self._note_loss(slot)

    def evict(self, slot: SlotId) -> None:
        """Free a cached copy now. Errors: InvariantError if the slot holds none."""
        if self.states[slot] != _CACHED:
            raise InvariantError("pool.evict", slot=slot, state=SlotState(self.states[slot]).name)
        self._evict([slot])

    def evict_many(self, slots: Slots) -> None:
        """Free cached copies now, in this order. Errors: as `evict`; nothing is changed then."""
        if (SlotIndex(slots).read(self.all_states) != _CACHED).any():
            raise InvariantError("pool.evict", slots=slots[:8].tolist())
        self._evict_many(slots)

    def evict_key(self, key: BlockKey) -> bool:
        """Free the cached copy of a block now. Return False if there is none, or if the copy is referenced."""
        slot = self.slot_by_key.get(key)
        if slot is None or self.states[slot] != _CACHED:
            return False
        self._evict([slot])
        return True

    # ---- inside

    def _settle(self, slot: SlotId) -> None:
        """Cache the copy that an unreferenced slot holds, or free the slot."""
        if self._is_keyed[slot]:
            self.states[slot] = _CACHED
            self.copies.add(slot)
        else:
            self._free(slot)

    def _settle_many(self, index: SlotIndex) -> None:
        """Cache the copies that these unreferenced slots hold, and free the other slots."""
        is_keyed = index.read(self.slot_by_key.all_named) > 0
        cached = index.filter(is_keyed)
        cached.write(self.all_states, _CACHED)
        self.copies.add_many(cached)
        if len(cached) < len(index):
            self._free_many(index.filter(~is_keyed))

    def _free(self, slot: SlotId) -> None:
        self.states[slot] = _FREE
        self.num_free += 1
        self.copies.reset(slot)
        self._note_loss(slot)

    def _free_many(self, index: SlotIndex) -> None:
        index.write(self.all_states, _FREE)
        self.num_free += len(index.slots)
        self.copies.reset_many(index)
        self.versions.end_many(index)
        if self.on_free_many is not None:
            self.on_free_many(index.slots)

    def _note_loss(self, slot: int) -> None:
        self.versions.end(slot)
        if self.on_free is not None:
            self.on_free(slot)

    def _evict(self, slots: Sequence[int]) -> None:
        for slot in map(SlotId, slots):
            key = self.key(slot)
            if key is None:
                raise InvariantError("pool.cached_without_key", slot=slot)
            if self.on_evict is not None:
                self.on_evict(key, slot)
            self.slot_by_key.unname(slot)
            self.copies.remove(slot)
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
        self.copies.remove_many(index)
        self._free_many(index)
        self.evictions += len(slots)

    # ---- checks

    def check_integrity(self) -> None:
        """Check that every slot is in exactly one state and that all books agree. Errors: InvariantError."""
        self.copies.check()
        cached = set(self.copies)
        deferred = {slot for slots in self.deferred.slots_by_step().values() for slot in slots}
        num_free = num_deferred = num_lent = 0
        for slot in range(1, self.blocks + 1):
            state, refs, key = self.states[slot], self.refs[slot], self.key(SlotId(slot))
            lent = self.transfer_refs[slot]
            num_free += state == _FREE
            num_deferred += state == _DEFERRED
            num_lent += 0 < lent == refs
            is_unknown = key is None and self.copies.classes[slot] == _ONCE and not self.copies.owners[slot]
            is_right = (
                state != _NULL
                and (state == _CACHED) == (slot in cached)
                and (state != _DEFERRED or slot in deferred)
                and (state == _OWNED) == (refs > 0)
                and refs >= lent >= 0
                and (state != _FREE or is_unknown)
                and (state != _CACHED or key is not None)
                and (key is None or self.slot_by_key.get(key) == slot)
            )
            if not is_right:
                raise InvariantError("pool.slot", slot=slot, state=SlotState(state).name, refs=refs, lent=lent, key=key)
        if (num_free, num_deferred, num_lent) != (self.num_free, self.num_deferred, self._references.num_lent):
            lent = self._references.num_lent
            raise InvariantError("pool.sums", free=self.num_free, deferred=self.num_deferred, lent=lent)
        if len(cached) != self.num_cached or len(self.slot_by_key) != sum(self._is_keyed):
            raise InvariantError("pool.keys", cached=self.num_cached, keys=len(self.slot_by_key))
        if self.states[NULL_BLOCK] != _NULL or self.refs[NULL_BLOCK]:
            raise InvariantError("pool.null_block")
