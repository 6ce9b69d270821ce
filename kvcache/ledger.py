"""The scratch overlay on which a plan is drawn. It changes nothing and dies with the step."""

from msgspec import Struct

from kvcache.holding import Holding, HoldingDraft
from kvcache.pool import SlotPool
from kvcache.table import BlockTable
from kvcache.tiers import TierBook
from tiercel.ids import BlockKey, SeqId, SlotId

MOST_HASHES = 2048  # blocks of one prompt a step: about 2 ms


class Found(Struct, frozen=True, gc=False):
    """The longest prefix of a sequence that need not be computed."""

    hits: tuple[tuple[int, SlotId], ...]  # (block number, slot): in the device tier
    loads: tuple[tuple[int, BlockKey], ...]  # (block number, key): to be restored from DDR
    tokens: int  # covered by both

    @property
    def hit_blocks(self) -> int:
        """Blocks that need no room."""
        return len(self.hits)

    @property
    def load_blocks(self) -> int:
        """Blocks to be restored first."""
        return len(self.loads)


class Ledger:
    """What the pool would look like if the plan were sealed now: {slot: change of references} and a few counts.

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
        has_prefix_caching: bool,
    ) -> None:
        self.block_size = block_size
        self.found_by_seq: dict[SeqId, Found] = {}
        self.taken_by_seq: dict[SeqId, int] = {}
        self.released: dict[SeqId, bool] = {}  # ordered; whether its blocks are spilled
        self._pool = pool
        self._table_by_seq = table_by_seq
        self._change_by_slot: dict[SlotId, int] = {}
        self._last_step_by_slot: dict[SlotId, int] = {}
        self._available = pool.num_free + pool.num_cached
        self._coming = max(0, pool.num_coming - tiers.stuck_blocks)
        self._in_flight = in_flight
        self._claims_by_seq: dict[SeqId, set[BlockKey]] = {}
        self._loading: set[BlockKey] = set()  # by restores that this plan begins
        self._tiers = tiers
        self._draft_by_holding: dict[Holding, HoldingDraft] = {}  # of tenants with a quota
        self._spill_room = tiers.spill_room()
        self._spilled: set[SlotId] = set()
        self._has_prefix_caching = has_prefix_caching

    @property
    def available_blocks(self) -> int:
        """Blocks that this plan can still take."""
        return self._available

    @property
    def coming_blocks(self) -> int:
        """Blocks that are free for a later plan: touched by a step in flight, or held by flying transfers only."""
        return self._coming

    @property
    def touched_blocks(self) -> int:
        """Blocks that steps in flight touch and nobody holds."""
        return self._pool.num_limbo

    def num_blocks(self, seq: SeqId) -> int:
        """Blocks that the sequence would hold."""
        held = 0 if seq in self.released else len(self._table_by_seq[seq].slots)
        found = self.found_by_seq.get(seq)
        return held + (len(found.hits) if found else 0) + self.taken_by_seq.get(seq, 0)

    def quota_left(self, seq: SeqId) -> int | None:
        """Blocks that the sequence's tenant may still take, less than 0 when it holds too many; None: no quota."""
        draft = self._holding(seq)
        return None if draft is None else (self._table_by_seq[seq].holding.most_blocks or 0) - draft.blocks

    def _holding(self, seq: SeqId) -> HoldingDraft | None:
        """What the sequence's tenant would hold; None when nobody asks, because it has no quota."""
        holding = self._table_by_seq[seq].holding
        if holding.most_blocks is None:
            return None
        draft = self._draft_by_holding.get(holding)
        if draft is None:
            draft = self._draft_by_holding[holding] = HoldingDraft(holding)
        return draft

    def match(self, seq: SeqId, *, may_load: bool = True) -> Found | None:
        """Give a sequence without blocks the longest prefix of its tokens that is cached in reach.

        At least one token is left to compute. None: ask again in the next step. Its next block is being computed by
        a launched or planned slice or is on its way up, or its prompt is so long that hashing it all at once would
        hold up the loop.
        """
        if not self._has_prefix_caching:
            return self._find(seq, [], [])
        table = self._table_by_seq[seq]
        limit = (len(table.tokens) - 1) // self.block_size
        if not table.hash_some(limit, self.block_size, MOST_HASHES) or (may_load and self._tiers.needs_fetch(table)):
            return None
        hits: list[tuple[int, SlotId]] = []
        loads: list[tuple[int, BlockKey]] = []
        for block in range(limit):
            key = table.key(block, self.block_size)
            slot = self._pool.slot_by_key.get(key)
            if slot is not None:
                hits.append((block, slot))
            elif self._is_in_flight(key) or (may_load and self._tiers.is_awaited(table, key)):
                return None
            elif may_load and self._tiers.loadable(key) is not None:
                loads.append((block, key))
            else:
                break
        if loads and not self._tiers.is_worth_loading(loads[0][0], len(loads), len(hits) + len(loads)):
            hits = hits[: loads[0][0]]
            loads = []
        if loads and self._tiers.num_spillable_of(key for _, key in loads) > self._spill_room.blocks:
            return None  # victims of this plan need the room of copies that it would load
        return self._find(seq, hits, loads)

    def _is_in_flight(self, key: BlockKey) -> bool:
        is_claimed = any(key in claims for claims in self._claims_by_seq.values())
        return is_claimed or key in self._in_flight or key in self._loading

    def _find(self, seq: SeqId, hits: list[tuple[int, SlotId]], loads: list[tuple[int, BlockKey]]) -> Found:
        for _, slot in hits:
            self._shift(slot, 1, 0)
        if (holding := self._holding(seq)) is not None:
            holding.shift((slot for _, slot in hits), 1)
        self._loading.update(key for _, key in loads)
        self._spill_room.blocks -= self._tiers.num_spillable_of(key for _, key in loads)
        found = Found(tuple(hits), tuple(loads), (len(hits) + len(loads)) * self.block_size)
        self.found_by_seq[seq] = found
        return found

    def blocks_below(self, seq: SeqId) -> tuple[int, int, int]:
        """Count the sequence's full blocks by the way that a swap would bring them back. Cost: O(blocks).

        Returns how many would go down first, how many DDR has, and how many the SSD alone has. Blocks that are in no
        lower tier and find no room there are not counted: they are lost.
        """
        if not self._tiers.has_lower_tier:
            return 0, 0, 0
        table = self._table_by_seq[seq]
        dirty = self._tiers.dirty(table)
        spilled, clean = self._spill_room.count(dirty), table.num_published - len(dirty)
        if self._tiers.host is None:
            return spilled, 0, clean
        return spilled, clean, self._tiers.num_on_disk(key for key, _ in dirty[spilled:])

    def reserve(self, seq: SeqId, tokens: int) -> bool:
        """Have room for the first `tokens` tokens of a sequence. False, and nothing changed, when there is none."""
        missing = -(-tokens // self.block_size) - self.num_blocks(seq)
        if missing > 0:
            if missing > self._available:
                return False
            self._available -= missing
            if (holding := self._holding(seq)) is not None:
                holding.blocks += missing
            self.taken_by_seq[seq] = self.taken_by_seq.get(seq, 0) + missing
        return True

    def claim(self, seq: SeqId, start: int, end: int) -> None:
        """A planned slice computes tokens [start, end), all known: others wait for its full blocks' commit."""
        if self._has_prefix_caching:
            table = self._table_by_seq[seq]
            self._claims_by_seq[seq] = {
                table.key(block, self.block_size) for block in range(start // self.block_size, end // self.block_size)
            }

    @property
    def claimed(self) -> set[BlockKey]:
        """Keys of blocks that this plan fills."""
        return set[BlockKey]().union(*self._claims_by_seq.values())

    def release(self, seq: SeqId, *, spills: bool = False) -> None:
        """Give up everything the sequence holds and would hold (preemption, or an admission that came to nothing).

        With `spills` its dirty blocks go to a lower tier first: their slots are free when they have landed.
        """
        self._claims_by_seq.pop(seq, None)  # what it was to compute, nobody need wait for
        found, taken, holding = self.found_by_seq.pop(seq, None), self.taken_by_seq.pop(seq, 0), self._holding(seq)
        for _, slot in found.hits if found else ():
            self._shift(slot, -1, 0)
        if holding is not None:
            holding.shift((slot for _, slot in (found.hits if found else ())), -1)
            holding.blocks -= taken
        if found:
            self._loading.difference_update(key for _, key in found.loads)
            self._spill_room.blocks += self._tiers.num_spillable_of(key for _, key in found.loads)
        self._available += taken
        table = self._table_by_seq[seq]
        if seq not in self.released and table.slots:
            self.released[seq] = spills
            if spills:
                self._spilled.update(slot for _, slot in self._spill_room.take(self._tiers.dirty(table)))
            for slot in table.slots:
                self._shift(SlotId(slot), -1, table.last_step)
            if holding is not None:
                holding.shift(table.slots, -1)

    def _shift(self, slot: SlotId, change: int, last_step: int) -> None:
        """Count references, and what they make of a slot: held, coming, or free to take."""
        pool = self._pool
        before = pool.refs[slot] - pool.transfer_refs[slot] + self._change_by_slot.get(slot, 0)
        after = before + change
        self._change_by_slot[slot] = self._change_by_slot.get(slot, 0) + change
        self._last_step_by_slot[slot] = max(self._last_step_by_slot.get(slot, 0), last_step)
        if before and after:
            return
        # The last table goes or the first one comes: a block enters or leaves what can be taken.
        sign = 1 if after == 0 else -1
        is_flying = pool.transfer_refs[slot] or slot in self._spilled
        if is_flying or pool.is_touched(slot, self._last_step_by_slot[slot]):
            self._coming += sign
        else:
            self._available += sign
