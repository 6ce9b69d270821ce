"""The slots of one tier: who holds them and when they may be used again."""

from collections.abc import Sequence

import numpy as np

from tiercel.errors import InvariantError
from tiercel.ids import BlockKey, SlotId
from tiercel.kvcache.index import KEY_BYTES as KEY_BYTES
from tiercel.kvcache.policy import Keep
from tiercel.kvcache.run import runs as runs
from tiercel.kvcache.slot_book import NULL_BLOCK as NULL_BLOCK
from tiercel.kvcache.slot_book import PROTECTED_SHARE as PROTECTED_SHARE
from tiercel.kvcache.slot_book import SlotBook
from tiercel.kvcache.slot_book import SlotState as SlotState
from tiercel.kvcache.vector import FEW, Slots, Where, as_slots, as_where

_BALANCE = 256  # copies that one commit demotes at most
_MANY = 1024  # slots from which on the largest free runs are found by one look at the whole pool
_FREE, _OWNED, _CACHED, _LIMBO, _NULL = (int(state) for state in SlotState)  # plain integers: the loop compares often
_ONCE, _REUSED = int(Keep.ONCE), int(Keep.REUSED)


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
        if count >= FEW:
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
        return self.take_where(count, near, headroom, by_transfer=by_transfer).slots

    def take_where(
        self, count: int, near: SlotId | None = None, headroom: int = 0, *, by_transfer: bool = False
    ) -> Where:
        """The same as `take_slots`, with the index of the slots."""
        if count < FEW:
            return Where(as_slots(self.take_many(count, near, headroom, by_transfer=by_transfer)))
        missing = count - self.num_free
        if missing > self._segments.count:
            raise InvariantError("pool.exhausted", blocks=self.blocks, wanted=count, missing=missing)
        if missing >= 0:  # every free slot is needed, and some of the cached
            slots = self._runs.every()
            if missing:
                victims = self._segments.many_victims(missing)
                self._evict_many(victims)
                slots = np.concatenate([slots, victims])
            where = Where(self._runs.take_all(slots, near))
        elif count < _MANY:
            found = self._runs.take(count, near, headroom)
            where = Where(np.concatenate([np.arange(first, first + length) for first, length in found]))
        else:
            where = Where(self._runs.take_many(count, near, headroom))
        slots = where.slots
        self._references.own_many(where, by_transfer)
        self.num_free -= count
        self.taken_slots += count
        self.taken_runs += 1 + int(np.count_nonzero(np.diff(slots) != 1)) - (near is not None and slots[0] == near + 1)
        return where

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
        elif state == _LIMBO:  # still valid: a keyed block is never written again
            self.num_limbo -= 1
        elif state != _OWNED:
            raise InvariantError("pool.hold_empty", slot=slot, state=SlotState(state).name)
        self.states[slot] = _OWNED
        self._references.change(slot, 1, by_transfer)
        if is_reuse and not by_transfer and segments.keeps[slot] == _ONCE and self._is_keyed[slot]:
            segments.keeps[slot] = _REUSED

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
            self.states[slot] = _LIMBO
            self._limbo_by_step.setdefault(last_step, []).append(slot)
            self.num_limbo += 1
        elif self._is_keyed[slot]:
            self.states[slot] = _CACHED
            self._segments.add(slot)
        else:
            self._free(slot)

    def hold_many(self, slots: Slots | Where, *, by_transfer: bool = False, is_reuse: bool = True) -> None:
        """Add one reference to each of these slots, as `hold` does for one.

        Errors: those of `hold`; no slot is changed then.
        """
        where, segments = as_where(slots), self._segments
        slots = where.slots
        if len(slots) < FEW:
            for slot in slots.tolist():
                self.hold(slot, by_transfer=by_transfer, is_reuse=is_reuse)
            return
        states = where.of(self.all_states)
        is_cached, is_limbo = states == _CACHED, states == _LIMBO
        if not (is_cached | is_limbo | (states == _OWNED)).all():
            raise InvariantError("pool.hold_empty", slots=slots[:8].tolist())
        cached = where.only(is_cached)
        if len(cached.slots):
            segments.remove_many(cached)
        self.num_limbo -= int(np.count_nonzero(is_limbo))
        where.put(self.all_states, _OWNED)
        self._references.change_many(where, 1, by_transfer)
        if is_reuse and not by_transfer:
            segments.reuse_many(where.only(where.of(self.slot_by_key.all_named) > 0))

    def drop_many(self, slots: Slots | Where, last_step: int, *, by_transfer: bool = False) -> None:
        """One reference less to each of these slots, in this order, as `drop`. Errors: as there."""
        where = as_where(slots)
        slots = where.slots
        if len(slots) < FEW:
            for slot in slots.tolist():
                self.drop(slot, last_step, by_transfer=by_transfer)
            return
        refs, lent = where.of(self.all_refs), where.of(self.all_transfer_refs)
        if ((lent if by_transfer else refs - lent) <= 0).any():
            raise InvariantError("pool.double_free", slots=slots[:8].tolist(), by_transfer=by_transfer)
        last_steps = np.maximum(where.of(self.all_last_steps), last_step)
        where.put(self.all_last_steps, last_steps)
        self._references.change_many(where, -1, by_transfer)
        is_last = refs == 1
        if not is_last.all():
            where, last_steps = where.only(is_last), last_steps[is_last]
        is_touched = last_steps > self.committed
        if is_touched.any():
            limbo, until = where.only(is_touched), last_steps[is_touched]
            limbo.put(self.all_states, _LIMBO)
            touched = limbo.slots
            self.num_limbo += len(touched)
            is_one_step = bool((until == until[0]).all())
            for step in [int(until[0])] if is_one_step else sorted(set(until.tolist())):
                part = touched if is_one_step else touched[until == step]
                self._limbo_by_step.setdefault(step, []).append(part)
            where = where.only(~is_touched)
        self._settle_many(where)

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
        if (Where(slots).of(self.all_states) != _CACHED).any():
            raise InvariantError("pool.evict", slots=slots[:8].tolist())
        self._evict_many(slots)

    def evict_key(self, key: BlockKey) -> bool:
        """Free the cached copy of a block now. False when there is none, or somebody holds it."""
        slot = self.slot_by_key.get(key)
        if slot is None or self.states[slot] != _CACHED:
            return False
        self._evict([slot])
        return True

    def set_keep(self, slot: SlotId, keep: Keep) -> None:
        """Say what a copy is kept for: at the recent end of that segment, now or when it becomes unreferenced."""
        segments, state = self._segments, self.states[slot]
        if segments.keeps[slot] == keep:
            return
        if state == _CACHED:
            segments.move(slot, keep)
        elif state in (_FREE, _NULL):
            raise InvariantError("pool.keep_empty", slot=slot)
        else:
            segments.keeps[slot] = keep

    def set_keep_many(self, slots: Slots | Where, keep: Keep) -> None:
        """Say what copies are kept for, in this order, as `set_keep`. Errors: as there; nothing is changed then."""
        segments = self._segments
        where = as_where(slots)
        where = where.only(where.of(segments.all_keeps) != keep)
        states = where.of(self.all_states)
        if ((states == _FREE) | (states == _NULL)).any():
            raise InvariantError("pool.keep_empty", slots=where.slots[:8].tolist())
        is_cached = states == _CACHED
        segments.move_many(where.only(is_cached), keep)
        where.put(segments.all_keeps, keep)

    def touch(self, slot: SlotId) -> None:
        """A cached copy is the last of its segment to go, as if it were released now."""
        if self.states[slot] == _CACHED:
            self._segments.move(slot, self._segments.keeps[slot])

    def set_owner(self, slot: SlotId, owner: int) -> None:
        """Say whose copy it is. A slot that becomes free is nobody's (0)."""
        if self._segments.owners[slot] == owner:
            return
        if self.states[slot] in (_FREE, _NULL):
            raise InvariantError("pool.owner_empty", slot=slot)
        self._segments.set_owner(slot, owner, is_listed=self.states[slot] == _CACHED)

    def set_owner_many(self, slots: Slots | Where, owner: int) -> None:
        """Say whose copies these are, as `set_owner`."""
        where = as_where(slots)
        states = where.of(self.all_states)
        if ((states == _FREE) | (states == _NULL)).any():
            raise InvariantError("pool.owner_empty", slots=where.slots[:8].tolist())
        self._segments.set_owner_many(where, owner, where.only(states == _CACHED))

    # ---- steps

    def commit(self, step: int) -> None:
        """Launched steps up to `step` touch nothing any more: their limbo slots settle."""
        self.committed = step
        for launched in [launched for launched in self._limbo_by_step if launched <= step]:
            for part in self._limbo_by_step.pop(launched):
                # A slot that was hit meanwhile left limbo, one released again is listed under a later step.
                if isinstance(part, np.ndarray):
                    where = Where(part)
                    where = where.only((where.of(self.all_states) == _LIMBO) & (where.of(self.all_last_steps) <= step))
                    self.num_limbo -= len(where)
                    self._settle_many(where)
                elif self.states[part] == _LIMBO and self.last_steps[part] <= step:
                    self.num_limbo -= 1
                    if self._is_keyed[part]:
                        self.states[part] = _CACHED
                        self._segments.add(part)
                    else:
                        self._free(part)
        self.balance()
        self.slot_by_key.tidy()

    def balance(self, most: int = _BALANCE) -> int:
        """Keep REUSED at its share: the oldest beyond it count as seen once."""
        return self._segments.demote(self.protected_share, most)
