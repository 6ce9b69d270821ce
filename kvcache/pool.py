"""The slots of one tier: who holds them and when they may be used again."""

import enum
from array import array
from collections.abc import Callable, Sequence

from kvcache.policy import Keep, Segments
from kvcache.reference import References
from kvcache.run import RunSearch
from kvcache.run import runs as runs
from tiercel.errors import InvariantError
from tiercel.ids import BlockKey, SlotId

SINK = SlotId(0)
"""Padded rows write here. Never owned, never read for a result."""

KEY_BYTES = 32

PROTECTED_SHARE = 0.25
"""Of the cached copies, at most this part is REUSED: the rest is room in which a new copy can prove itself."""

Heard = Callable[[BlockKey, SlotId], None]

_BALANCE = 256  # copies that one commit demotes at most


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
        self.slot_by_key: dict[BlockKey, SlotId] = {}
        self.committed = 0  # last committed step
        self.num_free = blocks
        self.num_limbo = 0
        self.on_evict: Heard | None = None  # a copy goes, keep and owner still tell; must not change this pool
        self.taken_slots = 0
        self.taken_runs = 0
        self.evictions = 0
        self._runs = RunSearch(self.states, _OWNED)
        self._segments = Segments(slots)
        # Bytes, not objects: a collection has nothing to visit here, whatever the number of blocks.
        self._keys = bytearray(KEY_BYTES * slots)
        self._is_keyed = bytearray(slots)
        self._limbo_by_step: dict[int, list[SlotId]] = {}

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
        return BlockKey(bytes(self._keys[KEY_BYTES * slot : KEY_BYTES * (slot + 1)])) if self._is_keyed[slot] else None

    def is_touched(self, slot: SlotId, last_step: int) -> bool:
        """A launched, uncommitted step may still read or write the slot."""
        return max(self.last_steps[slot], last_step) > self.committed

    def keep(self, slot: SlotId) -> Keep:
        """What its copy is or will be kept for."""
        return Keep(self._segments.keeps[slot])

    def num_kept(self, keep: Keep) -> int:
        """Cached copies kept for this."""
        return self._segments.counts[keep]

    def owner(self, slot: SlotId) -> int:
        """Whose copy it is; 0 is nobody's."""
        return self._segments.owners[slot]

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

    def discard(self, slot: SlotId) -> None:
        """Free a slot whose only reference is the caller's and whose content is worthless: a failed target."""
        if self.states[slot] != _OWNED or self.refs[slot] != 1 or self._is_keyed[slot]:
            state = SlotState(self.states[slot]).name
            raise InvariantError("pool.discard", slot=slot, state=state, refs=self.refs[slot], key=self._is_keyed[slot])
        self.drop(slot, 0, by_transfer=self.transfer_refs[slot] == 1)

    # ---- copies

    def publish(self, slot: SlotId, key: BlockKey) -> SlotId:
        """Name a committed full block. Returns the canonical slot: another one if the key is already here."""
        canonical = self.slot_by_key.setdefault(key, slot)
        if canonical == slot:
            self._keys[KEY_BYTES * slot : KEY_BYTES * (slot + 1)] = key
            self._is_keyed[slot] = True
        return canonical

    def forget(self, slot: SlotId) -> None:
        """An owned copy proved not to be what its key says: it loses the key, and its references stay."""
        key = self.key(slot)
        if key is None or self.states[slot] != _OWNED:
            raise InvariantError("pool.forget", slot=slot, state=SlotState(self.states[slot]).name)
        del self.slot_by_key[key]
        self._is_keyed[slot] = False

    def evict(self, slot: SlotId) -> None:
        """Free a cached copy now."""
        if self.states[slot] != _CACHED:
            raise InvariantError("pool.evict", slot=slot, state=SlotState(self.states[slot]).name)
        self._evict([slot])

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

    # ---- steps

    def commit(self, step: int) -> None:
        """Launched steps up to `step` touch nothing any more: their limbo slots settle."""
        self.committed = step
        for launched in [launched for launched in self._limbo_by_step if launched <= step]:
            for slot in self._limbo_by_step.pop(launched):
                # A slot that was hit meanwhile left limbo, one released again is listed under a later step.
                if self.states[slot] == _LIMBO and self.last_steps[slot] <= step:
                    self.num_limbo -= 1
                    if self._is_keyed[slot]:
                        self.states[slot] = _CACHED
                        self._segments.add(slot)
                    else:
                        self._free(slot)
        self.balance()

    def balance(self, most: int = _BALANCE) -> int:
        """Keep REUSED at its share: the oldest beyond it count as seen once."""
        return self._segments.demote(self.protected_share, most)

    # ---- inside

    def _free(self, slot: SlotId) -> None:
        """An unreferenced slot is empty and nobody's."""
        self.states[slot] = _FREE
        self.num_free += 1
        self._segments.reset(slot)

    def _evict(self, slots: Sequence[int]) -> None:
        segments, heard = self._segments, self.on_evict
        for slot in map(SlotId, slots):
            key = self.key(slot)
            if key is None:
                raise InvariantError("pool.cached_without_key", slot=slot)
            if heard is not None:
                heard(key, slot)
            del self.slot_by_key[key]
            self._is_keyed[slot] = False
            segments.remove(slot)
            self._free(slot)
        self.evictions += len(slots)

    # ---- tests

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
            {step: list(slots) for step, slots in self._limbo_by_step.items()},
            self._segments.snapshot(),
            (self.committed, self._runs.cursor, self.num_free, self.num_limbo, self._references.num_lent),
        )

    def check_integrity(self) -> None:
        """Every slot in exactly one state, sums constant, index, keys and lists agree. Errors: InvariantError."""
        segments = self._segments
        if not segments.check():
            raise InvariantError("pool.segments", counts=tuple(segments.counts), count=segments.count)
        cached = set(segments)
        limbo = {slot for slots in self._limbo_by_step.values() for slot in slots}
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
