"""The scratch overlay on which a plan is drawn. It changes nothing and dies with the step."""

import numpy as np
from msgspec import Struct

from tiercel.ids import BlockKey, SeqId
from tiercel.kvcache.overlay import Overlay
from tiercel.kvcache.pool import SlotPool
from tiercel.kvcache.slot_index import NO_SLOTS, Slots
from tiercel.kvcache.step_budget import StepBudget
from tiercel.kvcache.table import BlockTable
from tiercel.kvcache.tenant_holding import PlannedHolding, TenantHolding
from tiercel.kvcache.tiers import TierBook

_BATCH = 1024  # blocks looked up at once, as long as the device tier has them all
_LOOKS_OF_BATCH = 4  # blocks of a batch cost as much as one that is looked up alone


class PrefixMatch(Struct, frozen=True, gc=False):
    """The longest prefix of a sequence that need not be computed."""

    hits: Slots  # slots of the device tier, in the order of the blocks
    loads: Slots  # numbers of the blocks to be restored from DDR; all others are hits
    sources: Slots  # slots of DDR, one a load
    tokens: int  # covered by hits and loads

    @property
    def hit_blocks(self) -> int:
        """Blocks that need no room."""
        return len(self.hits)

    @property
    def load_blocks(self) -> int:
        """Blocks to be restored first."""
        return len(self.loads)


class Ledger:
    """What the pool would look like if the plan were sealed now: changes of references by slot, and a few counts.

    Plain counts would over-promise as soon as two victims share a block or a block is both evictable and a hit.
    """

    def __init__(
        self,
        pool: SlotPool,
        table_by_seq: dict[SeqId, BlockTable],
        block_size: int,
        in_flight: set[BlockKey],
        tiers: TierBook,
        *,
        overlay: Overlay,
        budget: StepBudget,
        has_prefix_caching: bool,
    ) -> None:
        self.block_size = block_size
        self.match_by_seq: dict[SeqId, PrefixMatch] = {}
        self.taken_by_seq: dict[SeqId, int] = {}
        self.released: dict[SeqId, int | None] = {}  # ordered; how many blocks go down, None: nothing is kept below
        self._pool = pool
        self._table_by_seq = table_by_seq
        self._overlay = overlay
        self._overlay.begin(pool.num_free + pool.num_cached, max(0, pool.num_coming - tiers.stuck_blocks))
        self._budget = budget
        self._in_flight = in_flight
        self._claims_by_seq: dict[SeqId, set[BlockKey]] = {}
        # By slot of DDR: a restore of this plan reads it.
        self._is_loading: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] | None = None
        self._tiers = tiers
        self._draft_by_holding: dict[TenantHolding, PlannedHolding] = {}  # of tenants with a quota
        self._spill_room = tiers.spill_room()
        self._has_prefix_caching = has_prefix_caching

    @property
    def available_blocks(self) -> int:
        """Blocks that this plan can still take."""
        return self._overlay.available

    @property
    def coming_blocks(self) -> int:
        """Blocks that are free for a later plan: touched by a step in flight, or held by flying transfers only."""
        return self._overlay.coming

    @property
    def touched_blocks(self) -> int:
        """Blocks that steps in flight touch and nobody holds."""
        return self._pool.num_deferred

    def num_blocks(self, seq: SeqId) -> int:
        """Blocks that the sequence would hold."""
        held = 0 if seq in self.released else len(self._table_by_seq[seq].slots)
        found = self.match_by_seq.get(seq)
        return held + (found.hit_blocks if found else 0) + self.taken_by_seq.get(seq, 0)

    def quota_left(self, seq: SeqId) -> int | None:
        """Blocks that the sequence's tenant may still take, less than 0 when it holds too many; None: no quota."""
        draft = self._holding(seq)
        return None if draft is None else (self._table_by_seq[seq].holding.max_blocks or 0) - draft.blocks

    def _holding(self, seq: SeqId) -> PlannedHolding | None:
        """What the sequence's tenant would hold; None when nobody asks, because it has no quota."""
        holding = self._table_by_seq[seq].holding
        if holding.max_blocks is None:
            return None
        draft = self._draft_by_holding.get(holding)
        if draft is None:
            draft = self._draft_by_holding[holding] = PlannedHolding(holding)
        return draft

    def match(self, seq: SeqId, *, may_load: bool = True) -> PrefixMatch | None:
        """Give a sequence without blocks the longest prefix of its tokens that is cached in reach.

        At least one token is left to compute. None: ask again in the next step. Its next block is being computed by
        a launched or planned slice or is on its way up, or the step's budget does not go as far as its prompt.
        """
        table = self._table_by_seq[seq]
        if not self._has_prefix_caching:
            return self._find(seq, NO_SLOTS)
        limit = (len(table.tokens) - 1) // self.block_size
        if not table.hash_some(limit, self.block_size, self._budget) or (may_load and self._tiers.needs_fetch(table)):
            return None
        if not self._look(table, limit, may_load=may_load):
            return None
        prefix = table.prefix
        slots, first = prefix.slots, prefix.first_load()
        if first == len(slots):
            return self._find(seq, slots, index=prefix.index)
        loads = prefix.loads()
        sources = slots[loads]
        if may_load and self._is_loading is not None and self._is_loading[sources].any():
            return None
        if not may_load or not self._tiers.is_worth_loading(first, prefix.num_loads, len(slots)):
            return self._find(seq, slots[:first])
        if self._tiers.num_spillable_of(sources) > self._spill_room.blocks:
            return None  # victims of this plan need the room of copies that it would load
        return self._find(seq, np.delete(slots, loads), loads, sources)

    def _look(self, table: BlockTable, limit: int, *, may_load: bool) -> bool:
        """Bring up to date what the table remembers of its prefix. False: wait for a block, or for the next step."""
        device, host, prefix = self._pool, self._tiers.host, table.prefix
        changed = prefix.changed(device, host)
        if changed and _LOOKS_OF_BATCH * len(changed) > len(prefix) - changed[0]:
            prefix.cut(changed[0])  # a batch finds them faster than one by one
            changed.clear()
        for block in changed:
            if not self._budget.take_looks(1):
                return False
            match self._place(table, block):
                case True:
                    continue
                case None:
                    if may_load or self._is_in_flight(table.key(block, self.block_size)):
                        return False
                case False:
                    pass
            prefix.cut(block)
            break
        prefix.compared(device, host)
        batch = 1
        while (block := len(prefix)) < limit:
            count = min(limit - block, batch)
            batch = min(8 * batch, _BATCH)
            if not self._budget.take_looks(-(-count // _LOOKS_OF_BATCH)):
                return False
            slots = device.slot_by_key.find(table.keys(block, block + count))
            if len(slots):
                prefix.extend(slots, device.stamps[slots])
            if len(slots) == count:
                continue
            batch = 1
            if host is not None and self._look_below(table, limit):
                continue
            if not self._budget.take_looks(1):
                return False
            is_there = self._place(table, len(prefix))
            if is_there is None and (may_load or self._is_in_flight(table.key(len(prefix), self.block_size))):
                return False
            if not is_there:
                return True
        return True

    def _look_below(self, table: BlockTable, limit: int) -> int:
        """Remember the next blocks as long as they lie in DDR alone and nothing happens to them. Return how many."""
        tiers, prefix, before = self._tiers, table.prefix, len(table.prefix)
        if tiers.host is None or tiers.links is None:
            return 0
        batch = 1  # a prompt of which nothing is there must cost next to nothing: it is looked up in every step
        while (count := min(limit - len(prefix), batch)) and self._budget.take_looks(-(-count // _LOOKS_OF_BATCH)):
            keys = table.keys(len(prefix), len(prefix) + count)
            slots = tiers.host.slot_by_key.find(keys)
            is_other = (tiers.links.above[slots] > 0) | tiers.transfers.are_rising(slots)
            if is_other.any():
                slots = slots[: int(np.argmax(is_other))]
            taken = keys[: len(slots)]
            if not all(others.isdisjoint(taken) for others in (self._in_flight, *self._claims_by_seq.values())):
                break
            prefix.extend(slots, tiers.host.stamps[slots], is_load=True)
            if len(slots) < count:
                break
            batch = min(8 * batch, _BATCH)
        return len(prefix) - before

    def _place(self, table: BlockTable, block: int) -> bool | None:
        """Remember where a block of the table lies. False: it is not in reach; None: it is on its way."""
        key, tiers = table.key(block, self.block_size), self._tiers
        slot = self._pool.slot_by_key.get(key)
        if slot is not None:
            table.prefix.put(block, slot, self._pool.stamp(slot), is_load=False)
            return True
        if self._is_in_flight(key) or tiers.is_awaited(table, key):
            return None
        slot = tiers.loadable(key)
        if slot is None or tiers.host is None:
            return False
        table.prefix.put(block, slot, tiers.host.stamp(slot), is_load=True)
        return True

    def _is_in_flight(self, key: BlockKey) -> bool:
        is_claimed = any(key in claims for claims in self._claims_by_seq.values())
        return is_claimed or key in self._in_flight

    def _find(
        self,
        seq: SeqId,
        hits: Slots,
        loads: Slots = NO_SLOTS,
        sources: Slots = NO_SLOTS,
        index: slice | Slots | None = None,
    ) -> PrefixMatch:
        self._overlay.give(hits, hits if index is None else index)
        if (holding := self._holding(seq)) is not None:
            holding.shift(hits, 1)
        if len(loads):
            self._mark_loading(sources, is_loading=True)
            self._spill_room.blocks -= self._tiers.num_spillable_of(sources)
        found = PrefixMatch(hits, loads, sources, (len(hits) + len(loads)) * self.block_size)
        self.match_by_seq[seq] = found
        return found

    def _mark_loading(self, sources: Slots, *, is_loading: bool) -> None:
        host = self._tiers.host
        if self._is_loading is None and host is not None:
            self._is_loading = np.zeros(host.blocks + 1, bool)
        if self._is_loading is not None:
            self._is_loading[sources] = is_loading

    def blocks_below(self, seq: SeqId) -> tuple[int, int, int]:
        """Count the sequence's full blocks by the way that a swap would bring them back.

        Returns how many would go down first, how many DDR has, and how many the SSD alone has. Blocks that are in no
        lower tier and find no room there are not counted: they are lost.
        Cost: one look of numpy at the table's links; where DDR is full, some look-ups on the SSD.
        """
        if not self._tiers.has_lower_tier:
            return 0, 0, 0
        table = self._table_by_seq[seq]
        dirty = self._tiers.dirty(table)
        kept = self._tiers.num_clean(table) if self._spill_room.blocks < table.num_published else 0
        spilled = self._spill_room.count(table.published().pick(dirty), kept)
        clean = table.num_published - len(dirty)
        if self._tiers.host is None:
            return spilled, 0, clean
        return spilled, clean, self._tiers.num_on_disk(table, dirty[spilled:])

    def reserve(self, seq: SeqId, tokens: int) -> bool:
        """Have room for the first `tokens` tokens of a sequence. False, and nothing changed, when there is none."""
        missing = -(-tokens // self.block_size) - self.num_blocks(seq)
        if missing > 0:
            if missing > self._overlay.available:
                return False
            self._overlay.available -= missing
            if (holding := self._holding(seq)) is not None:
                holding.blocks += missing
            self.taken_by_seq[seq] = self.taken_by_seq.get(seq, 0) + missing
        return True

    def claim(self, seq: SeqId, start: int, end: int) -> None:
        """A planned slice computes tokens [start, end), all known: others wait for its full blocks' commit."""
        if self._has_prefix_caching:
            table, host = self._table_by_seq[seq], self._tiers.host
            claims = self._claims_by_seq[seq] = set[BlockKey]()
            for block in range(start // self.block_size, end // self.block_size):
                key = table.key(block, self.block_size)
                claims.add(key)
                # Sequences that would load the block from DDR must look again: it is being computed now.
                if host is not None and (slot := host.slot_by_key.get(key)) is not None:
                    host.change_stamp(slot)

    @property
    def claimed(self) -> set[BlockKey]:
        """Keys of blocks that this plan fills."""
        return set[BlockKey]().union(*self._claims_by_seq.values())

    def release(self, seq: SeqId, *, spills: bool = False) -> None:
        """Give up everything the sequence holds and would hold (preemption, or an admission that came to nothing).

        With `spills` its dirty blocks go to a lower tier first: their slots are free when they have landed.
        """
        self._claims_by_seq.pop(seq, None)  # what it was to compute, nobody need wait for
        found, taken, holding = self.match_by_seq.pop(seq, None), self.taken_by_seq.pop(seq, 0), self._holding(seq)
        if found is not None:
            self._overlay.take_back(found.hits)
            if holding is not None:
                holding.shift(found.hits, -1)
            if found.load_blocks:
                self._mark_loading(found.sources, is_loading=False)
                self._spill_room.blocks += self._tiers.num_spillable_of(found.sources)
        if holding is not None:
            holding.blocks -= taken
        self._overlay.available += taken
        table = self._table_by_seq[seq]
        if seq not in self.released and table.slots:
            self.released[seq] = None
            held = table.held()
            if spills:
                dirty = table.published().pick(self._tiers.dirty(table))
                self.released[seq] = chosen = self._spill_room.take(dirty, self._tiers.num_clean(table))
                self._overlay.spill(dirty.head(chosen))
            self._overlay.shift(held, -1, table.last_step)
            if holding is not None:
                holding.shift(held.slots, -1)
