"""The scratch overlay on which a plan is drawn. It changes nothing and dies with the step."""

from kvcache.pool import SlotPool
from kvcache.table import BlockTable
from tiercel.ids import BlockKey, SeqId, SlotId

_MOST_HASHES = 2048  # blocks of one prompt a step: about 2 ms


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
        *,
        has_prefix_caching: bool,
    ) -> None:
        self.block_size = block_size
        self.hits_by_seq: dict[SeqId, list[SlotId]] = {}
        self.taken_by_seq: dict[SeqId, int] = {}
        self.released: dict[SeqId, None] = {}  # ordered
        self._pool = pool
        self._table_by_seq = table_by_seq
        self._change_by_slot: dict[SlotId, int] = {}
        self._last_step_by_slot: dict[SlotId, int] = {}
        self._available = pool.num_free + pool.num_cached
        self._coming = pool.num_limbo
        self._in_flight = in_flight
        self._claimed: set[BlockKey] = set()
        self._has_prefix_caching = has_prefix_caching

    @property
    def available_blocks(self) -> int:
        """Blocks that this plan can still take."""
        return self._available

    @property
    def coming_blocks(self) -> int:
        """Blocks in limbo: free for the plan after the commit of the steps in flight."""
        return self._coming

    def num_blocks(self, seq: SeqId) -> int:
        """Blocks that the sequence would hold."""
        held = 0 if seq in self.released else len(self._table_by_seq[seq].slots)
        return held + len(self.hits_by_seq.get(seq, ())) + self.taken_by_seq.get(seq, 0)

    def match(self, seq: SeqId) -> int | None:
        """Give a sequence without blocks the longest cached prefix of its tokens.

        Returns the tokens that it covers, a multiple of the block size; at least one token is left to compute.
        None: ask again in the next step. Its next block is being computed by a launched or planned slice, or its
        prompt is so long that hashing it all at once would hold up the loop.
        """
        if not self._has_prefix_caching:
            return 0
        table = self._table_by_seq[seq]
        limit = (len(table.tokens) - 1) // self.block_size
        if not table.hash_some(limit, self.block_size, _MOST_HASHES):
            return None
        hits: list[SlotId] = []
        for block in range(limit):
            key = table.key(block, self.block_size)
            slot = self._pool.slot_by_key.get(key)
            if slot is None:
                if key in self._in_flight or key in self._claimed:
                    return None
                break
            hits.append(slot)
        for slot in hits:
            self._shift(slot, 1, 0)
        self.hits_by_seq[seq] = hits
        return len(hits) * self.block_size

    def reserve(self, seq: SeqId, tokens: int) -> bool:
        """Have room for the first `tokens` tokens of a sequence. False, and nothing changed, when there is none."""
        missing = -(-tokens // self.block_size) - self.num_blocks(seq)
        if missing > 0:
            if missing > self._available:
                return False
            self._available -= missing
            self.taken_by_seq[seq] = self.taken_by_seq.get(seq, 0) + missing
        return True

    def claim(self, seq: SeqId, start: int, end: int) -> None:
        """A planned slice computes tokens [start, end), all known: others wait for its full blocks' commit."""
        if self._has_prefix_caching:
            table = self._table_by_seq[seq]
            self._claimed.update(
                table.key(block, self.block_size) for block in range(start // self.block_size, end // self.block_size)
            )

    @property
    def claimed(self) -> set[BlockKey]:
        """Keys of blocks that this plan fills."""
        return self._claimed

    def release(self, seq: SeqId) -> None:
        """Give up everything the sequence holds and would hold (preemption, or an admission that came to nothing)."""
        for slot in self.hits_by_seq.pop(seq, ()):
            self._shift(slot, -1, 0)
        self._available += self.taken_by_seq.pop(seq, 0)
        table = self._table_by_seq[seq]
        if seq not in self.released and table.slots:
            self.released[seq] = None
            for slot in table.slots:
                self._shift(SlotId(slot), -1, table.last_step)

    def _shift(self, slot: SlotId, change: int, last_step: int) -> None:
        before = self._pool.refs[slot] + self._change_by_slot.get(slot, 0)
        after = before + change
        self._change_by_slot[slot] = self._change_by_slot.get(slot, 0) + change
        self._last_step_by_slot[slot] = max(self._last_step_by_slot.get(slot, 0), last_step)
        if before and after:
            return
        # The last reference goes or the first one comes: a block enters or leaves what can be taken.
        sign = 1 if after == 0 else -1
        if self._pool.is_touched(slot, self._last_step_by_slot[slot]):
            self._coming += sign
        else:
            self._available += sign
