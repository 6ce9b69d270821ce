"""The draft of the cache on which a plan is drawn. It changes nothing and ends with the step."""

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from tiercel.kvcache.disk_traffic import DiskTraffic
from tiercel.kvcache.fetch import FetchWork
from tiercel.kvcache.overlay import Overlay
from tiercel.kvcache.slot_index import NO_SLOTS, SlotIndex, Slots
from tiercel.kvcache.step_budget import BLOCKS_PER_LOOK, MAX_BATCH, StepBudget
from tiercel.kvcache.swap import SwapBook
from tiercel.kvcache.table import BlockTable
from tiercel.kvcache.tenant_holding import PlannedHolding, TenantHolding
from tiercel.kvcache.tiers import TierSet
from tiercel.values.ids import BlockKey, SeqId


class PrefixMatch(Struct, frozen=True, gc=False):
    """The longest prefix of a sequence that need not be computed."""

    hits: SlotIndex  # slots of the device tier, in the order of the blocks
    loads: Slots  # numbers of the blocks to be restored from DDR; all other blocks are hits
    sources: Slots  # the slot of DDR for each load
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
    """The cache as it would be if the plan were sealed now: changes of references by slot, and a few counts.

    Plain counts would promise too much as soon as two victims share a block, or a block is both evictable and a hit.
    """

    def __init__(
        self,
        tiers: TierSet,
        disk_traffic: DiskTraffic,
        swaps: SwapBook,
        fetches: FetchWork,
        table_by_seq: dict[SeqId, BlockTable],
        block_size: int,
        in_flight: set[BlockKey],
        *,
        overlay: Overlay,
        budget: StepBudget,
        has_prefix_caching: bool,
    ) -> None:
        """`in_flight` are the keys of the blocks that launched steps compute."""
        self.block_size = block_size
        self.match_by_seq: dict[SeqId, PrefixMatch] = {}
        self.taken_by_seq: dict[SeqId, int] = {}
        self.released: dict[SeqId, int | None] = {}  # in order; how many blocks go down, None: nothing is kept below
        self._tiers = tiers
        self._pool = tiers.device
        self._disk_traffic = disk_traffic
        self._swaps = swaps
        self._fetches = fetches
        self._table_by_seq = table_by_seq
        self._overlay = overlay
        coming = max(0, self._pool.num_coming - disk_traffic.stuck_blocks)
        self._overlay.begin(self._pool.num_free + self._pool.num_cached, coming)
        self._budget = budget
        self._in_flight = in_flight
        self._claims_by_seq: dict[SeqId, set[BlockKey]] = {}
        self._running_by_key: dict[BlockKey, SeqId] = {}  # by the block that a running sequence computes next
        self._is_loading: npt.NDArray[np.bool_] | None = None  # by slot of DDR: a restore of this plan reads it
        self._planned_by_holding: dict[TenantHolding, PlannedHolding] = {}  # of tenants with a quota
        self._spill_room = swaps.spill_room()
        self._has_prefix_caching = has_prefix_caching

    # ---- facts

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
        """Blocks that no table holds and that steps in flight touch."""
        return self._pool.num_deferred

    def num_blocks(self, seq: SeqId) -> int:
        """Return the number of blocks that the sequence would hold."""
        held = 0 if seq in self.released else len(self._table_by_seq[seq].slots)
        match = self.match_by_seq.get(seq)
        return held + (match.hit_blocks if match else 0) + self.taken_by_seq.get(seq, 0)

    def quota_left(self, seq: SeqId) -> int | None:
        """Return how many blocks the sequence's tenant may still take.

        Less than 0 if the tenant would hold too many; None if it has no quota.
        """
        planned = self._planned_holding(seq)
        return None if planned is None else planned.left

    def blocks_below(self, seq: SeqId) -> tuple[int, int, int]:
        """Count the sequence's full blocks by the way in which a swap would bring them back.

        Return how many would go down first, how many DDR has, and how many the SSD alone has. Blocks that are in no
        lower tier and find no room there are not counted: they are lost.
        Cost: one numpy look at the table's links; if DDR is full, some look-ups on the SSD.
        """
        if not self._swaps.has_lower_tier:
            return 0, 0, 0
        table = self._table_by_seq[seq]
        dirty = self._swaps.dirty(table)
        kept = self._swaps.num_clean(table) if self._spill_room.blocks < table.num_published else 0
        spilled = self._spill_room.count(table.published().pick(dirty), kept)
        clean = table.num_published - len(dirty)
        if self._tiers.host is None:
            return spilled, 0, clean
        return spilled, clean, self._disk_traffic.count_copies(table, dirty[spilled:])

    @property
    def claimed(self) -> set[BlockKey]:
        """Keys of the blocks that this plan computes."""
        return set[BlockKey]().union(*self._claims_by_seq.values())

    # ---- what a plan decides

    def match(self, seq: SeqId, *, may_load: bool = True) -> PrefixMatch | None:
        """Give a sequence without blocks the longest prefix of its tokens that is cached in reach.

        At least one token is left to compute. Returns None if the caller must ask again in the next step: the next
        block is being computed by a launched or planned slice or is on its way up, or the step's budget is spent.
        """
        table = self._table_by_seq[seq]
        if not self._has_prefix_caching:
            return self._give(seq, SlotIndex(NO_SLOTS))
        limit = table.reusable_blocks(self.block_size)
        if not table.hash_some(limit, self.block_size, self._budget) or (may_load and self._fetches.needs_fetch(table)):
            return None
        if not self._look_up(table, limit, may_load=may_load):
            return None
        prefix = table.prefix
        slots, first = prefix.index.slots, prefix.first_load()
        if first == len(slots):
            return self._give(seq, prefix.index)
        loads = prefix.loads()
        sources = slots[loads]
        if may_load and self._is_loading is not None and self._is_loading[sources].any():
            return None
        if not may_load or not self._swaps.is_worth_loading(first, prefix.num_loads, len(slots)):
            return self._give(seq, SlotIndex(slots[:first]))
        if self._swaps.num_spillable_of(sources) > self._spill_room.blocks:
            return None  # victims of this plan need the room of copies that the restore would hold
        return self._give(seq, SlotIndex(np.delete(slots, loads)), loads, sources)

    def reserve(self, seq: SeqId, tokens: int) -> bool:
        """Take room for a sequence's first `tokens` tokens. Return False, and change nothing, if it does not fit."""
        missing = -(-tokens // self.block_size) - self.num_blocks(seq)
        if missing > 0:
            if missing > self._overlay.available:
                return False
            self._overlay.take(missing)
            if (planned := self._planned_holding(seq)) is not None:
                planned.take(missing)
            self.taken_by_seq[seq] = self.taken_by_seq.get(seq, 0) + missing
        return True

    def claim(self, seq: SeqId, start: int, end: int) -> None:
        """Note that a planned slice computes the known tokens [start, end): others wait for its full blocks."""
        if self._has_prefix_caching:
            table, host = self._table_by_seq[seq], self._tiers.host
            claims = self._claims_by_seq[seq] = set[BlockKey]()
            for block in range(start // self.block_size, end // self.block_size):
                key = table.key(block, self.block_size)
                claims.add(key)
                # Sequences that would load the block from DDR must look again: it is being computed now.
                if host is not None and (slot := host.slot_by_key.get(key)) is not None:
                    host.versions.change(slot)

    def follow(self, seq: SeqId, start: int) -> None:
        """Note that a running or admitted sequence computes a prompt, of which `start` tokens are computed or planned.

        Cost: one hash at most.
        """
        table, block = self._table_by_seq[seq], start // self.block_size
        if self._has_prefix_caching and (block + 1) * self.block_size <= len(table.tokens):
            self._running_by_key.setdefault(table.key(block, self.block_size), seq)

    def computing(self, seq: SeqId, tokens: int) -> SeqId | None:
        """Return the followed sequence that computes next what `seq` lacks behind its first `tokens` cached tokens.

        None if there is none, or if `seq` lacks no whole block.
        """
        table, block = self._table_by_seq[seq], tokens // self.block_size
        if not self._running_by_key or block >= table.reusable_blocks(self.block_size):
            return None
        return self._running_by_key.get(table.key(block, self.block_size))

    def release(self, seq: SeqId, *, spills: bool = False) -> None:
        """Give up everything that the sequence holds and would hold: a preemption, or an admission that failed.

        With `spills` its dirty blocks go to a lower tier first; their slots are free when the blocks have landed.
        """
        self._claims_by_seq.pop(seq, None)
        planned = self._planned_holding(seq)
        match, taken = self.match_by_seq.pop(seq, None), self.taken_by_seq.pop(seq, 0)
        if match is not None:
            self._overlay.take_back(match.hits)
            if planned is not None:
                planned.shift(match.hits, -1)
            if match.load_blocks:
                self._set_loading(match.sources, is_loading=False)
                self._spill_room.shrink(-self._swaps.num_spillable_of(match.sources))
        if planned is not None:
            planned.take(-taken)
        self._overlay.take(-taken)
        table = self._table_by_seq[seq]
        if seq not in self.released and table.slots:
            self.released[seq] = None
            held = table.held()
            if spills:
                dirty = table.published().pick(self._swaps.dirty(table))
                self.released[seq] = chosen = self._spill_room.take(dirty, self._swaps.num_clean(table))
                self._overlay.spill(dirty.head(chosen))
            self._overlay.shift(held, -1, table.last_step)
            if planned is not None:
                planned.shift(held, -1)

    # ---- look-up of a prefix

    def _look_up(self, table: BlockTable, limit: int, *, may_load: bool) -> bool:
        """Bring the table's known prefix up to date. Return False if it must wait for a block, or for the next step."""
        device, host, prefix = self._pool, self._tiers.host, table.prefix
        changed = prefix.changed(device, host)
        if changed and BLOCKS_PER_LOOK * len(changed) > len(prefix) - changed[0]:
            prefix.cut(changed[0])  # a batch finds these blocks faster than one look-up for each
            changed.clear()
        for block in changed:
            if not self._budget.take_looks(1):
                return False
            match self._look_up_block(table, block):
                case True:
                    continue
                case None:
                    if may_load or self._is_being_computed(table.key(block, self.block_size)):
                        return False
                case False:
                    pass
            prefix.cut(block)
            break
        prefix.note_compared(device, host)
        batch = 1
        while (block := len(prefix)) < limit:
            count = min(limit - block, batch)
            batch = min(8 * batch, MAX_BATCH)
            if not self._budget.take_looks(-(-count // BLOCKS_PER_LOOK)):
                return False
            slots = device.slot_by_key.find(table.keys(block, block + count))
            if len(slots):
                prefix.extend(slots, device.versions.stamps[slots])
            if len(slots) == count:
                continue
            batch = 1
            if host is not None and self._look_up_below(table, limit):
                continue
            if not self._budget.take_looks(1):
                return False
            block = len(prefix)
            is_here = self._look_up_block(table, block)
            if is_here is None and (may_load or self._is_being_computed(table.key(block, self.block_size))):
                return False
            if not is_here:
                return True
        return True

    def _look_up_below(self, table: BlockTable, limit: int) -> int:
        """Add the next blocks to the prefix as long as they lie in DDR alone and are not moved. Return how many."""
        tiers, prefix, before = self._tiers, table.prefix, len(table.prefix)
        if tiers.host is None or tiers.links is None:
            return 0
        batch = 1  # a prompt without any cached block is looked up in every step, and must cost next to nothing
        while (count := min(limit - len(prefix), batch)) and self._budget.take_looks(-(-count // BLOCKS_PER_LOOK)):
            keys = table.keys(len(prefix), len(prefix) + count)
            slots = tiers.host.slot_by_key.find(keys)
            is_elsewhere = (tiers.links.above[slots] > 0) | tiers.transfers.are_rising(slots)
            if is_elsewhere.any():
                slots = slots[: int(np.argmax(is_elsewhere))]
            taken = keys[: len(slots)]
            if not all(others.isdisjoint(taken) for others in (self._in_flight, *self._claims_by_seq.values())):
                break
            prefix.extend(slots, tiers.host.versions.stamps[slots], is_load=True)
            if len(slots) < count:
                break
            batch = min(8 * batch, MAX_BATCH)
        return len(prefix) - before

    def _look_up_block(self, table: BlockTable, block: int) -> bool | None:
        """Put one block into the prefix. Return False if it is not in reach, and None if it is on its way."""
        key, tiers = table.key(block, self.block_size), self._tiers
        slot = self._pool.slot_by_key.get(key)
        if slot is not None:
            table.prefix.put(block, slot, self._pool.versions.stamp(slot), is_load=False)
            return True
        if self._is_being_computed(key) or self._disk_traffic.is_awaited(table, key):
            return None
        slot = tiers.loadable(key)
        if slot is None or tiers.host is None:
            return False
        table.prefix.put(block, slot, tiers.host.versions.stamp(slot), is_load=True)
        return True

    def _is_being_computed(self, key: BlockKey) -> bool:
        is_claimed = any(key in claims for claims in self._claims_by_seq.values())
        return is_claimed or key in self._in_flight

    # ---- inside

    def _give(self, seq: SeqId, hits: SlotIndex, loads: Slots = NO_SLOTS, sources: Slots = NO_SLOTS) -> PrefixMatch:
        """Give a sequence its matched prefix."""
        self._overlay.give(hits)
        if (planned := self._planned_holding(seq)) is not None:
            planned.shift(hits, 1)
        if len(loads):
            self._set_loading(sources, is_loading=True)
            self._spill_room.shrink(self._swaps.num_spillable_of(sources))
        match = PrefixMatch(hits, loads, sources, (len(hits) + len(loads)) * self.block_size)
        self.match_by_seq[seq] = match
        return match

    def _set_loading(self, sources: Slots, *, is_loading: bool) -> None:
        host = self._tiers.host
        if self._is_loading is None and host is not None:
            self._is_loading = np.zeros(host.blocks + 1, bool)
        if self._is_loading is not None:
            self._is_loading[sources] = is_loading

    def _planned_holding(self, seq: SeqId) -> PlannedHolding | None:
        """Return what the sequence's tenant would hold; None, and nothing is counted, if it has no quota."""
        holding = self._table_by_seq[seq].holding
        if holding.max_blocks is None:
            return None
        planned = self._planned_by_holding.get(holding)
        if planned is None:
            planned = self._planned_by_holding[holding] = PlannedHolding(holding, holding.max_blocks)
        return planned
