"""The slots of one tier: who holds them and when they may be used again."""

from collections.abc import Sequence

import numpy as np

from tiercel.errors import InvariantError
from tiercel.ids import BlockKey, SlotId
from tiercel.kvcache.eviction import RetentionClass
from tiercel.kvcache.free_run import count_runs as count_runs
from tiercel.kvcache.key_index import KEY_BYTES as KEY_BYTES
from tiercel.kvcache.slot_book import NULL_BLOCK as NULL_BLOCK
from tiercel.kvcache.slot_book import PROTECTED_SHARE as PROTECTED_SHARE
from tiercel.kvcache.slot_book import SlotBook
from tiercel.kvcache.slot_book import SlotState as SlotState
from tiercel.kvcache.slot_index import MIN_NUMPY_SLOTS, SlotIndex, Slots, as_index, as_slots

_BALANCE = 256  # copies that one commit demotes at most
_MANY = 1024  # slots from which on the largest free runs are found by one look at the whole pool
_FREE, _OWNED, _CACHED, _DEFERRED, _NULL = (
    int(state) for state in SlotState
)  # plain integers: the loop compares often
_ONCE, _REUSED = int(RetentionClass.ONCE), int(RetentionClass.REUSED)


class SlotPool(SlotBook):
    """The moves of the slots of a tier: references, copies and steps. The only writer of the books."""

    # ---- references

    def take(self) -> SlotId:
        """Own an empty slot; evicts a cached copy when none is free. Errors: as `take_many`."""
        return self.take_many(1)[0]

    def take_many(
        self, count: int, near: SlotId | None = None, headroom: int = 0, *, by_transfer: bool = False
    ) -> list[SlotId]:
        """Own `count` empty slots with one reference each, in as few runs of consecutive slots as there are.

        First comes what directly continues `near`, the last slot of the table; then a run with `headroom` more slots,
        that stay free so that the sequence can grow in place; then the largest runs. Cached copies are evicted
        before anything is placed, as many as are missing.
        Errors: InvariantError when too little is free or cached: the plan promised too much. Nothing is changed then.
        """
        if count >= MIN_NUMPY_SLOTS:
            return self.take_slots(count, near, headroom, by_transfer=by_transfer).tolist()
        missing = count - self.num_free
        if missing > self._segments.count:
            raise InvariantError("pool.exhausted", blocks=self.blocks, wanted=count, missing=missing)
        if missing < 0:
            found = self._runs.take(count, near, headroom)
        else:  # every free slot is needed, and some of the cached
            slots = self._runs.all() if self.num_free else []
            if missing:
                victims = self._segments.victims(missing)
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
        """The same as `take_many`, for many slots."""
        return self.take_index(count, near, headroom, by_transfer=by_transfer).slots

    def take_index(
        self, count: int, near: SlotId | None = None, headroom: int = 0, *, by_transfer: bool = False
    ) -> SlotIndex:
        """The same as `take_slots`, with the index of the slots."""
        if count < MIN_NUMPY_SLOTS:
            return SlotIndex(as_slots(self.take_many(count, near, headroom, by_transfer=by_transfer)))
        missing = count - self.num_free
        if missing > self._segments.count:
            raise InvariantError("pool.exhausted", blocks=self.blocks, wanted=count, missing=missing)
        if missing >= 0:  # every free slot is needed, and some of the cached
            slots = self._runs.every()
            if missing:
                victims = self._segments.many_victims(missing)
                self._evict_many(victims)
                slots = np.concatenate([slots, victims])
            index = SlotIndex(self._runs.take_all(slots, near))
        elif count < _MANY:
            found = self._runs.take(count, near, headroom)
            index = SlotIndex(np.concatenate([np.arange(first, first + length) for first, length in found]))
        else:
            index = SlotIndex(self._runs.take_many(count, near, headroom))
        slots = index.slots
        self._references.own_many(index, by_transfer)
        self.num_free -= count
        self.taken_slots += count
        self.taken_runs += 1 + int(np.count_nonzero(np.diff(slots) != 1)) - (near is not None and slots[0] == near + 1)
        return index

    def take_at(self, slot: SlotId, *, by_transfer: bool = False) -> bool:
        """Own this slot, if it is a free one: it held a copy before we started."""
        if not 0 < slot <= self.blocks or self.states[slot] != _FREE:
            return False
        self._references.own_runs(self._runs.take_these([slot], None), by_transfer)
        self.num_free -= 1
        return True

    def adopt(self, slot: SlotId, key: BlockKey) -> bool:
        """A free slot is said to hold this block. False when it is not free or the block is known."""
        if key in self.slot_by_key or not self.take_at(slot):
            return False
        self.publish(slot, key)
        self.drop(slot, 0)
        return True

    def hold(self, slot: SlotId, *, by_transfer: bool = False, is_reuse: bool = True) -> None:
        """One more reference: of a table to a block that is here (a prefix hit), or of a transfer.

        A table's hit makes a copy that was seen once a reused one, unless `is_reuse` is false.
        """
        state, segments = self.states[slot], self._segments
        if state == _CACHED:
            segments.remove(slot)
        elif state == _DEFERRED:  # still valid: a keyed block is never written again
            self.num_deferred -= 1
        elif state != _OWNED:
            raise InvariantError("pool.hold_empty", slot=slot, state=SlotState(state).name)
        self.states[slot] = _OWNED
        self._references.change(slot, 1, by_transfer)
        if is_reuse and not by_transfer and segments.classes[slot] == _ONCE and self._is_keyed[slot]:
            segments.classes[slot] = _REUSED

    def drop(self, slot: SlotId, last_step: int, *, by_transfer: bool = False) -> None:
        """One reference less. The last one frees the slot, caches its copy, or sends it to limbo first."""
        refs, lent = self.refs[slot], self.transfer_refs[slot]
        if (lent if by_transfer else refs - lent) <= 0:
            raise InvariantError("pool.double_free", slot=slot, refs=refs, by_transfers=lent, by_transfer=by_transfer)
        last_step = self.last_steps[slot] = max(self.last_steps[slot], last_step)
        self._references.change(slot, -1, by_transfer)
        if refs > 1:
            return
        if last_step > self.committed:
            self.states[slot] = _DEFERRED
            self._deferred_by_step.setdefault(last_step, []).append(slot)
            self.num_deferred += 1
        elif self._is_keyed[slot]:
            self.states[slot] = _CACHED
            self._segments.add(slot)
        else:
            self._free(slot)

    def hold_many(self, slots: Slots | SlotIndex, *, by_transfer: bool = False, is_reuse: bool = True) -> None:
        """Add one reference to each of these slots, as `hold` does for one.

        Errors: those of `hold`; no slot is changed then.
        """
        index, segments = as_index(slots), self._segments
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
            segments.remove_many(cached)
        self.num_deferred -= int(np.count_nonzero(is_deferred))
        index.write(self.all_states, _OWNED)
        self._references.change_many(index, 1, by_transfer)
        if is_reuse and not by_transfer:
            segments.reuse_many(index.filter(index.read(self.slot_by_key.all_named) > 0))

    def drop_many(self, slots: Slots | SlotIndex, last_step: int, *, by_transfer: bool = False) -> None:
        """One reference less to each of these slots, in this order, as `drop`. Errors: as there."""
        index = as_index(slots)
        slots = index.slots
        if len(slots) < MIN_NUMPY_SLOTS:
            for slot in slots.tolist():
                self.drop(slot, last_step, by_transfer=by_transfer)
            return
        refs, lent = index.read(self.all_refs), index.read(self.all_transfer_refs)
        if ((lent if by_transfer else refs - lent) <= 0).any():
            raise InvariantError("pool.double_free", slots=slots[:8].tolist(), by_transfer=by_transfer)
        last_steps = np.maximum(index.read(self.all_last_steps), last_step)
        index.write(self.all_last_steps, last_steps)
        self._references.change_many(index, -1, by_transfer)
        is_last = refs == 1
        if not is_last.all():
            index, last_steps = index.filter(is_last), last_steps[is_last]
        is_touched = last_steps > self.committed
        if is_touched.any():
            deferred, until = index.filter(is_touched), last_steps[is_touched]
            deferred.write(self.all_states, _DEFERRED)
            touched = deferred.slots
            self.num_deferred += len(touched)
            is_one_step = bool((until == until[0]).all())
            for step in [int(until[0])] if is_one_step else sorted(set(until.tolist())):
                part = touched if is_one_step else touched[until == step]
                self._deferred_by_step.setdefault(step, []).append(part)
            index = index.filter(~is_touched)
        self._settle_many(index)

    def discard(self, slot: SlotId) -> None:
        """Free a slot whose only reference is the caller's and whose content is worthless: a failed target."""
        if self.states[slot] != _OWNED or self.refs[slot] != 1 or self._is_keyed[slot]:
            state = SlotState(self.states[slot]).name
            raise InvariantError("pool.discard", slot=slot, state=state, refs=self.refs[slot], key=self._is_keyed[slot])
        self.drop(slot, 0, by_transfer=self.transfer_refs[slot] == 1)

    # ---- copies

    def publish(self, slot: SlotId, key: BlockKey) -> SlotId:
        """Name a committed full block. Returns the canonical slot: another one if the key is already here."""
        is_named = self._is_keyed[slot]
        canonical = self.slot_by_key.name(slot, key)
        if canonical == slot and not is_named and self.on_name is not None:
            self.on_name(key, slot)
        return canonical

    def publish_many(self, slots: Slots, keys: Sequence[BlockKey]) -> Slots:
        """Name committed full blocks, none of which has a name. Returns the slots whose keys were here already."""
        is_new = self.slot_by_key.name_many(slots, keys)
        named = slots if is_new.all() else slots[is_new]
        if self.on_name_many is not None and len(named):
            self.on_name_many(named)
        return slots[~is_new]

    def forget(self, slot: SlotId) -> None:
        """An owned copy proved not to be what its key says: it loses the key, and its references stay."""
        key = self.key(slot)
        if key is None or self.states[slot] != _OWNED:
            raise InvariantError("pool.forget", slot=slot, state=SlotState(self.states[slot]).name)
        self.slot_by_key.unname(slot)
        self._lose(slot)

    def evict(self, slot: SlotId) -> None:
        """Free a cached copy now."""
        if self.states[slot] != _CACHED:
            raise InvariantError("pool.evict", slot=slot, state=SlotState(self.states[slot]).name)
        self._evict([slot])

    def evict_many(self, slots: Slots) -> None:
        """Free cached copies now, in this order."""
        if (SlotIndex(slots).read(self.all_states) != _CACHED).any():
            raise InvariantError("pool.evict", slots=slots[:8].tolist())
        self._evict_many(slots)

    def evict_key(self, key: BlockKey) -> bool:
        """Free the cached copy of a block now. False when there is none, or somebody holds it."""
        slot = self.slot_by_key.get(key)
        if slot is None or self.states[slot] != _CACHED:
            return False
        self._evict([slot])
        return True

    def set_retention(self, slot: SlotId, retention: RetentionClass) -> None:
        """Say what a copy is kept for: at the recent end of that segment, now or when it becomes unreferenced."""
        segments, state = self._segments, self.states[slot]
        if segments.classes[slot] == retention:
            return
        if state == _CACHED:
            segments.move(slot, retention)
        elif state in (_FREE, _NULL):
            raise InvariantError("pool.keep_empty", slot=slot)
        else:
            segments.classes[slot] = retention

    def set_retention_many(self, slots: Slots | SlotIndex, retention: RetentionClass) -> None:
        """Say what copies are kept for, in this order, as `set_keep`. Errors: as there; nothing is changed then."""
        segments = self._segments
        index = as_index(slots)
        index = index.filter(index.read(segments.all_classes) != retention)
        states = index.read(self.all_states)
        if ((states == _FREE) | (states == _NULL)).any():
            raise InvariantError("pool.keep_empty", slots=index.slots[:8].tolist())
        is_cached = states == _CACHED
        segments.move_many(index.filter(is_cached), retention)
        index.write(segments.all_classes, retention)

    def touch(self, slot: SlotId) -> None:
        """A cached copy is the last of its segment to go, as if it were released now."""
        if self.states[slot] == _CACHED:
            self._segments.move(slot, self._segments.classes[slot])

    def set_owner(self, slot: SlotId, owner: int) -> None:
        """Say whose copy it is. A slot that becomes free is nobody's (0)."""
        if self._segments.owners[slot] == owner:
            return
        if self.states[slot] in (_FREE, _NULL):
            raise InvariantError("pool.owner_empty", slot=slot)
        self._segments.set_owner(slot, owner, is_listed=self.states[slot] == _CACHED)

    def set_owner_many(self, slots: Slots | SlotIndex, owner: int) -> None:
        """Say whose copies these are, as `set_owner`."""
        index = as_index(slots)
        states = index.read(self.all_states)
        if ((states == _FREE) | (states == _NULL)).any():
            raise InvariantError("pool.owner_empty", slots=index.slots[:8].tolist())
        self._segments.set_owner_many(index, owner, index.filter(states == _CACHED))

    # ---- steps

    def commit(self, step: int) -> None:
        """Launched steps up to `step` touch nothing any more: their limbo slots settle."""
        self.committed = step
        for launched in [launched for launched in self._deferred_by_step if launched <= step]:
            for part in self._deferred_by_step.pop(launched):
                # A slot that was hit meanwhile left limbo, one released again is listed under a later step.
                if isinstance(part, np.ndarray):
                    index = SlotIndex(part)
                    index = index.filter(
                        (index.read(self.all_states) == _DEFERRED) & (index.read(self.all_last_steps) <= step)
                    )
                    self.num_deferred -= len(index)
                    self._settle_many(index)
                elif self.states[part] == _DEFERRED and self.last_steps[part] <= step:
                    self.num_deferred -= 1
                    if self._is_keyed[part]:
                        self.states[part] = _CACHED
                        self._segments.add(part)
                    else:
                        self._free(part)
        self.balance()
        self.slot_by_key.tidy()

    def balance(self, maximum: int = _BALANCE) -> int:
        """Keep REUSED at its share: the oldest beyond it count as seen once."""
        return self._segments.demote(self.protected_share, maximum)
