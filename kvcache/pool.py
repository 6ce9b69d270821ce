"""The slots of one tier: who holds them and when they may be used again."""

import enum
from array import array
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvcache.index import KEY_BYTES as KEY_BYTES
from kvcache.index import KeyIndex
from kvcache.policy import Keep, Segments
from kvcache.reference import References
from kvcache.run import RunSearch
from kvcache.run import runs as runs
from kvcache.vector import FEW, Slots, as_slots, view
from tiercel.errors import InvariantError
from tiercel.ids import BlockKey, SlotId

SINK = SlotId(0)
"""Padded rows write here. Never owned, never read for a result."""

PROTECTED_SHARE = 0.25
"""Of the cached copies, at most this part is REUSED: the rest is room in which a new copy can prove itself."""

Heard = Callable[[BlockKey, SlotId], None]
HeardMany = Callable[[Slots], None]

_BALANCE = 256  # copies that one commit demotes at most
_MANY = 1024  # slots from which on the largest free runs are found by one look at the whole pool


class SlotState(enum.IntEnum):
    """FREE -> OWNED -> (LIMBO) -> FREE or CACHED; CACHED -> OWNED by a hit, CACHED -> FREE by eviction."""

    FREE = 0  # holds nothing
    OWNED = 1  # referenced by at least one table or flying transfer
    CACHED = 2  # unreferenced, holds a valid keyed copy: a hit or the next victim
    LIMBO = 3  # unreferenced, but a launched step still touches it
    SINK = 4


_FREE, _OWNED, _CACHED, _LIMBO, _SINK = (int(state) for state in SlotState)  # plain integers: the loop compares often
_ONCE, _REUSED = int(Keep.ONCE), int(Keep.REUSED)


class SlotPool:
    """Struct of arrays over all slots of a tier, and the index from key to slot."""

    def __init__(self, blocks: int, *, protected_share: float = PROTECTED_SHARE) -> None:
        slots = blocks + 1
        self.blocks = blocks
        self.protected_share = protected_share
        # The states are the map of free slots too: a run of zeros is a run of free slots, found at the speed of C.
        self.states = bytearray(slots)
        self.states[SINK] = _SINK
        self._references = References(slots)
        self.refs = self._references.totals  # of tables and transfers
        self.transfer_refs = self._references.transfers  # of transfers alone
        self.last_steps = array("q", bytes(8 * slots))  # last launched step that touches the slot, as of its release
        self.all_states, self.all_last_steps = view(self.states), view(self.last_steps)
        self.all_refs, self.all_transfer_refs = self._references.all_totals, self._references.all_transfers
        self.slot_by_key = KeyIndex(slots)
        self._stamps = array("q", bytes(8 * slots))
        self.stamps = view(self._stamps)  # counts up when a slot's copy goes: who remembers a slot can tell
        self.num_lost = 0  # copies that went: while this does not change, no stamp does
        self.committed = 0  # last committed step
        self.num_free = blocks
        self.num_limbo = 0
        # Called before a copy is evicted, while its retention class and owner are readable; must not change this pool.
        self.on_evict: Heard | None = None
        self.on_evict_many: HeardMany | None = None  # called instead for many at once
        self.on_name: Heard | None = None  # called when a slot has got a name
        self.on_name_many: HeardMany | None = None  # called instead for many at once
        self.on_free: Callable[[int], None] | None = None  # called when a slot becomes free or loses its name
        self.on_free_many: HeardMany | None = None
        self.taken_slots = 0
        self.taken_runs = 0
        self.evictions = 0
        self._runs = RunSearch(self.states, _OWNED)
        self._segments = Segments(slots)
        self._is_keyed = self.slot_by_key.is_named
        self._limbo_by_step: dict[int, list[SlotId | Slots]] = {}  # in order of release; of many at once a part

    # ---- facts

    @property
    def num_cached(self) -> int:
        return self._segments.count

    @property
    def num_owned(self) -> int:
        return self.blocks - self.num_free - self.num_cached - self.num_limbo

    @property
    def num_coming(self) -> int:
        """Slots that become free or cached by themselves: when steps commit and transfers land."""
        return self.num_limbo + self._references.num_lent

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

    def keep(self, slot: SlotId) -> Keep:
        """What its copy is or will be kept for."""
        return Keep(self._segments.keeps[slot])

    def are_kept(self, slots: Slots, keep: Keep) -> "npt.NDArray[np.bool_]":
        """Return for each slot whether its copy is or will be kept for this."""
        return self._segments.all_keeps[slots] == keep

    def are_kept_beyond(self, slots: Slots, keep: Keep) -> "npt.NDArray[np.bool_]":
        """Return for each slot whether its copy is kept for more than this."""
        return self._segments.all_keeps[slots] > keep

    def owners(self, slots: Slots) -> Slots:
        """Return the owner of each slot's copy; 0 is nobody."""
        return self._segments.all_owners[slots]

    def num_kept(self, keep: Keep) -> int:
        """Cached copies kept for this."""
        return self._segments.counts[keep]

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
        if count < FEW:
            return as_slots(self.take_many(count, near, headroom, by_transfer=by_transfer))
        missing = count - self.num_free
        if missing > self._segments.count:
            raise InvariantError("pool.exhausted", blocks=self.blocks, wanted=count, missing=missing)
        if missing >= 0:  # every free slot is needed, and some of the cached
            slots = self._runs.every()
            if missing:
                victims = self._segments.many_victims(missing)
                self._evict_many(victims)
                slots = np.concatenate([slots, victims])
            slots = self._runs.take_all(slots, near)
        elif count < _MANY:
            found = self._runs.take(count, near, headroom)
            slots = np.concatenate([np.arange(first, first + length) for first, length in found])
        else:
            slots = self._runs.take_many(count, near, headroom)
        self._references.own_many(slots, by_transfer)
        self.num_free -= count
        self.taken_slots += count
        self.taken_runs += 1 + int(np.count_nonzero(np.diff(slots) != 1)) - (near is not None and slots[0] == near + 1)
        return slots

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

    def hold_many(self, slots: Slots, *, by_transfer: bool = False, is_reuse: bool = True) -> None:
        """One more reference to each of these slots, as `hold`. Errors: as there; nothing is changed then."""
        if len(slots) < FEW:
            for slot in slots.tolist():
                self.hold(slot, by_transfer=by_transfer, is_reuse=is_reuse)
            return
        states, segments = self.all_states[slots], self._segments
        is_cached, is_limbo = states == _CACHED, states == _LIMBO
        if not (is_cached | is_limbo | (states == _OWNED)).all():
            raise InvariantError("pool.hold_empty", slots=slots[:8].tolist())
        cached = slots[is_cached]
        if len(cached):
            segments.remove_many(cached)
        self.num_limbo -= int(np.count_nonzero(is_limbo))
        self.all_states[slots] = _OWNED
        self._references.change_many(slots, 1, by_transfer)
        if is_reuse and not by_transfer:
            segments.reuse_many(slots[self.slot_by_key.all_named[slots] > 0])

    def drop_many(self, slots: Slots, last_step: int, *, by_transfer: bool = False) -> None:
        """One reference less to each of these slots, in this order, as `drop`. Errors: as there."""
        if len(slots) < FEW:
            for slot in slots.tolist():
                self.drop(slot, last_step, by_transfer=by_transfer)
            return
        refs, lent = self.all_refs[slots], self.all_transfer_refs[slots]
        if ((lent if by_transfer else refs - lent) <= 0).any():
            raise InvariantError("pool.double_free", slots=slots[:8].tolist(), by_transfer=by_transfer)
        last_steps = np.maximum(self.all_last_steps[slots], last_step)
        self.all_last_steps[slots] = last_steps
        self._references.change_many(slots, -1, by_transfer)
        is_last = refs == 1
        if not is_last.all():
            slots, last_steps = slots[is_last], last_steps[is_last]
        is_touched = last_steps > self.committed
        if is_touched.any():
            touched, until = slots[is_touched], last_steps[is_touched]
            self.all_states[touched] = _LIMBO
            self.num_limbo += len(touched)
            is_one_step = bool((until == until[0]).all())
            for step in [int(until[0])] if is_one_step else sorted(set(until.tolist())):
                part = touched if is_one_step else touched[until == step]
                self._limbo_by_step.setdefault(step, []).append(part)
            slots = slots[~is_touched]
        self._settle_many(slots)

    def _settle_many(self, slots: Slots) -> None:
        """Cache the copies that slots without references hold, and free the other slots."""
        is_keyed = self.slot_by_key.all_named[slots] > 0
        cached = slots[is_keyed]
        self.all_states[cached] = _CACHED
        self._segments.add_many(cached)
        if len(cached) < len(slots):
            self._free_many(slots[~is_keyed])

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
        if (self.all_states[slots] != _CACHED).any():
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
        elif state in (_FREE, _SINK):
            raise InvariantError("pool.keep_empty", slot=slot)
        else:
            segments.keeps[slot] = keep

    def set_keep_many(self, slots: Slots, keep: Keep) -> None:
        """Say what copies are kept for, in this order, as `set_keep`. Errors: as there; nothing is changed then."""
        segments = self._segments
        slots = slots[segments.all_keeps[slots] != keep]
        states = self.all_states[slots]
        if ((states == _FREE) | (states == _SINK)).any():
            raise InvariantError("pool.keep_empty", slots=slots[:8].tolist())
        is_cached = states == _CACHED
        segments.move_many(slots[is_cached], keep)
        segments.all_keeps[slots] = keep

    def touch(self, slot: SlotId) -> None:
        """A cached copy is the last of its segment to go, as if it were released now."""
        if self.states[slot] == _CACHED:
            self._segments.move(slot, self._segments.keeps[slot])

    def set_owner(self, slot: SlotId, owner: int) -> None:
        """Say whose copy it is. A slot that becomes free is nobody's (0)."""
        if self._segments.owners[slot] == owner:
            return
        if self.states[slot] in (_FREE, _SINK):
            raise InvariantError("pool.owner_empty", slot=slot)
        self._segments.set_owner(slot, owner, is_listed=self.states[slot] == _CACHED)

    def set_owner_many(self, slots: Slots, owner: int) -> None:
        """Say whose copies these are, as `set_owner`."""
        states = self.all_states[slots]
        if ((states == _FREE) | (states == _SINK)).any():
            raise InvariantError("pool.owner_empty", slots=slots[:8].tolist())
        self._segments.set_owner_many(slots, owner, slots[states == _CACHED])

    # ---- steps

    def commit(self, step: int) -> None:
        """Launched steps up to `step` touch nothing any more: their limbo slots settle."""
        self.committed = step
        for launched in [launched for launched in self._limbo_by_step if launched <= step]:
            for part in self._limbo_by_step.pop(launched):
                # A slot that was hit meanwhile left limbo, one released again is listed under a later step.
                if isinstance(part, np.ndarray):
                    part = part[(self.all_states[part] == _LIMBO) & (self.all_last_steps[part] <= step)]
                    self.num_limbo -= len(part)
                    self._settle_many(part)
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

    # ---- inside

    def _free(self, slot: SlotId) -> None:
        """An unreferenced slot is empty and nobody's."""
        self.states[slot] = _FREE
        self.num_free += 1
        self._segments.reset(slot)
        self._lose(slot)

    def _free_many(self, slots: Slots) -> None:
        """Unreferenced slots are empty and nobody's."""
        self.all_states[slots] = _FREE
        self.num_free += len(slots)
        self._segments.reset_many(slots)
        self.stamps[slots] += 1
        self.num_lost += 1
        if self.on_free_many is not None:
            self.on_free_many(slots)

    def _lose(self, slot: int) -> None:
        """A slot has lost its copy: who remembers it must look again."""
        self._stamps[slot] += 1
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

    def change_stamps(self, slots: Slots) -> None:
        """Make all who remember these slots look again: something about their copies has changed in another tier."""
        self.stamps[slots] += 1
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
        if len(slots) < FEW or (self.on_evict is not None and self.on_evict_many is None):
            self._evict(slots.tolist())
            return
        if not self.slot_by_key.all_named[slots].all():
            raise InvariantError("pool.cached_without_key", slots=slots[:8].tolist())
        if self.on_evict_many is not None:
            self.on_evict_many(slots)
        self.slot_by_key.unname_many(slots)
        self._segments.remove_many(slots)
        self._free_many(slots)
        self.evictions += len(slots)

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
            {step: self._flat(parts) for step, parts in self._limbo_by_step.items()},
            self._segments.snapshot(),
            (self.committed, self._runs.cursor, self.num_free, self.num_limbo, self._references.num_lent),
        )

    def check_integrity(self) -> None:
        """Every slot in exactly one state, sums constant, index, keys and lists agree. Errors: InvariantError."""
        segments = self._segments
        if not segments.check():
            raise InvariantError("pool.segments", counts=tuple(segments.counts), count=segments.count)
        cached = set(segments)
        limbo = {slot for parts in self._limbo_by_step.values() for slot in self._flat(parts)}
        num_free = num_limbo = num_lent = 0
        for slot in range(1, self.blocks + 1):
            state, refs, key = self.states[slot], self.refs[slot], self.key(SlotId(slot))
            lent = self.transfer_refs[slot]
            num_free += state == _FREE
            num_limbo += state == _LIMBO
            num_lent += 0 < lent == refs
            is_right = (
                state != _SINK
                and (state == _CACHED) == (slot in cached)
                and (state != _LIMBO or slot in limbo)
                and (state == _OWNED) == (refs > 0)
                and refs >= lent >= 0
                and (state != _FREE or (key is None and segments.keeps[slot] == _ONCE and not segments.owners[slot]))
                and (state != _CACHED or key is not None)
                and (key is None or self.slot_by_key.get(key) == slot)
            )
            if not is_right:
                raise InvariantError("pool.slot", slot=slot, state=SlotState(state).name, refs=refs, lent=lent, key=key)
        if (num_free, num_limbo, num_lent) != (self.num_free, self.num_limbo, self._references.num_lent):
            raise InvariantError("pool.sums", free=self.num_free, limbo=self.num_limbo, lent=self._references.num_lent)
        if len(cached) != self.num_cached or len(self.slot_by_key) != sum(self._is_keyed):
            raise InvariantError("pool.keys", cached=self.num_cached, keys=len(self.slot_by_key))
        if self.states[SINK] != _SINK or self.refs[SINK]:
            raise InvariantError("pool.sink")
