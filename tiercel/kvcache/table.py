"""The block table of one sequence."""

from array import array
from collections.abc import Callable, Iterable

import numpy as np
from msgspec import Struct

from tiercel.kvcache.pool import SlotPool
from tiercel.kvcache.prefix import Prefix
from tiercel.kvcache.slot_index import MIN_NUMPY_SLOTS, NO_SLOTS, SlotIndex, Slots, as_slots
from tiercel.kvcache.step_budget import StepBudget
from tiercel.kvcache.tenant_holding import TenantHolding
from tiercel.values.block_key import child_key
from tiercel.values.ids import BlockKey, SeqId, SlotId


class RetainedCopies(Struct, frozen=True, gc=False):
    """Slots of a lower tier in the order of their blocks, and the life of each slot when it was looked up."""

    slots: Slots
    lives: Slots


NO_COPIES = RetainedCopies(NO_SLOTS, NO_SLOTS)


class Restore:
    """Blocks of one sequence on their way up. Until they have landed the table holds slots without content."""

    __slots__ = ("blocks_by_transfer", "covered", "first", "is_whole", "landed", "replaced")

    def __init__(self, covered: int, blocks_by_transfer: dict[int, Slots]) -> None:
        self.covered = covered  # leading blocks that will have content
        self.blocks_by_transfer = blocks_by_transfer  # the numbers of the blocks that still fly
        self.first = min(int(blocks[0]) for blocks in blocks_by_transfer.values())  # the first block that comes up
        self.landed = 0  # blocks
        self.is_whole = True  # no transfer has failed
        self.replaced: list[int] = []  # canonical slots that the table got, because another copy was named first

    def flying(self) -> set[int]:
        """Return the numbers of the blocks that still fly."""
        return {block for blocks in self.blocks_by_transfer.values() for block in blocks.tolist()}


class Fetch:
    """The reads from the disk for a waiting sequence, made once for each wait."""

    __slots__ = (
        "_lives",
        "_slots",
        "cursor",
        "is_done",
        "is_given_up",
        "is_hashed",
        "is_queued",
        "landed",
        "passed_over_s",
        "predicted_s",
        "reads",
        "runs",
        "worth_until",
    )

    def __init__(self) -> None:
        self.cursor = 0  # blocks of the chain that were looked at
        self.landed = 0  # blocks before the cursor that have been seen in reach
        self.is_hashed = False  # all keys are known: from now on the sequence waits for the disk alone
        self.is_queued = False  # the next read waits until other reads have landed
        self.is_done = False  # nothing more will be asked for
        self.is_given_up = False  # the sequence does not wait for reads any more
        self.passed_over_s: float | None = None  # since then the sequence could run but for its fetch
        self.predicted_s = 0.0  # seconds that the reads are expected to take
        self.worth_until = 0  # blocks before this one are worth reading
        self.reads: set[BlockKey] = set()  # that fly for the sequence
        # Copies kept from eviction while the sequence waits: runs of blocks, and blocks found or landed one by one.
        self.runs: list[RetainedCopies] = []
        self._slots, self._lives = array("q"), array("q")

    def want(self, slot: int, pool: SlotPool) -> None:
        """Note that a copy in the gateway is kept from eviction for the sequence."""
        self._slots.append(slot)
        self._lives.append(pool.versions.life(slot))

    def wanted(self) -> RetainedCopies:
        """Return all copies that are kept from eviction for the sequence."""
        slots, lives = np.array(self._slots, np.intp), np.array(self._lives, np.int64)
        return RetainedCopies(
            np.concatenate([slots, *(run.slots for run in self.runs)]),
            np.concatenate([lives, *(run.lives for run in self.runs)]),
        )

    def give_up(self) -> None:
        """End the fetch: the sequence takes what has landed and does not wait for reads any more."""
        self.is_done = self.is_given_up = True


class Reuse(Struct, frozen=True, gc=False):
    """Tokens of one sequence that were not computed because a lower tier had them."""

    loaded_tokens: int = 0  # restored from DDR before the sequence first ran
    fetched_tokens: int = 0  # read from SSD before the sequence first ran
    swapped_tokens: int = 0  # restored or read after the sequence was preempted


NO_REUSE = Reuse()


class BlockTable:
    """One sequence's slots in order, the keys of its full blocks, and what each part of the cache notes about it.

    The CacheManager writes the table, except for fields that name another writer below. `tokens` is the sequence's own
    array of token ids, which only grows; the table reads it.
    """

    __slots__ = (
        "_held",
        "_keys",
        "_root",
        "copied_s",
        "fetch",
        "holding",
        "is_closed",
        "last_step",
        "num_fetched",
        "num_loaded",
        "num_published",
        "num_saved",
        "num_swapped",
        "owner",
        "prefix",
        "restore",
        "retained",
        "reuse_limit",
        "seq",
        "slots",
        "tokens",
        "was_preempted",
    )

    def __init__(self, seq: SeqId, root: BlockKey, tokens: "array[int]", owner: int, holding: TenantHolding) -> None:
        self.seq = seq
        self.tokens = tokens
        self.slots: array[int] = array("i")
        self.num_published = 0  # leading blocks that are keyed and canonical
        self.retained = NO_COPIES  # copies below that are kept for the preempted sequence; the SwapBook writes
        self.prefix = Prefix()  # that the waiting sequence was found to have in reach; the Ledger writes
        self.reuse_limit: int | None = None  # leading tokens that may come from cached blocks; None: any
        self.num_saved = 0  # leading blocks that were offered to a lower tier; WriteBack writes
        self.last_step = 0  # last launched step with a slice of this sequence
        self.owner = owner  # of the blocks, for the floors of eviction
        self.holding = holding  # by all tables of the tenant
        self.restore: Restore | None = None  # while it flies
        self.fetch = Fetch()  # of the current wait; FetchWork writes
        self.is_closed = False  # the sequence has ended
        self.was_preempted = False  # the sequence held blocks once and lost them
        self.num_loaded = 0  # blocks restored from DDR before that; the SwapBook writes these counts
        self.num_fetched = 0  # blocks read from the SSD before that
        self.num_swapped = 0  # blocks that came up after that
        self.copied_s = 0.0  # that copies of its blocks took since its last preemption; the LandingBook writes
        self._root = root
        self._held: SlotIndex | None = None  # all slots; None after a change
        self._keys: list[BlockKey] = []  # only grows: tokens never change

    # ---- slots

    def extend(self, slots: Iterable[int]) -> None:
        """Append slots to the table."""
        first, self._held = len(self.slots), None
        if isinstance(slots, np.ndarray):
            self.slots.frombytes(slots.astype(np.int32).tobytes())
        else:
            self.slots.extend(slots)
        self.holding.add(self.slots[first:])

    def replace(self, block: int, slot: int) -> None:
        """Put another slot with the same content in place of a block's slot."""
        self._held = None
        self.holding.remove((self.slots[block],))
        self.slots[block] = slot
        self.holding.add((slot,))

    def cut(self, blocks: int) -> None:
        """Remove all slots but the first `blocks`."""
        self.holding.remove(self.slots[blocks:] if blocks else self.held())
        self.slots, self._held = self.slots[:blocks], None

    # ---- facts

    def reuse(self, block_size: int) -> Reuse:
        """Return what lower tiers have brought the sequence."""
        if not (self.num_loaded or self.num_fetched or self.num_swapped):
            return NO_REUSE
        return Reuse(self.num_loaded * block_size, self.num_fetched * block_size, self.num_swapped * block_size)

    def reusable_blocks(self, block_size: int) -> int:
        """Return how many leading blocks may come from the cache. At least one token is left to compute."""
        most = len(self.tokens) - 1
        return (most if self.reuse_limit is None else min(most, self.reuse_limit)) // block_size

    def key(self, block: int, block_size: int) -> BlockKey:
        """Return the key of a block whose tokens are all known. Cost: hashes the chain up to it once."""
        keys = self._keys
        if len(keys) <= block:
            first = len(keys)
            packed = self.tokens[first * block_size : (block + 1) * block_size].tobytes()
            width, parent = len(packed) // (block + 1 - first), keys[-1] if keys else self._root
            for start in range(0, len(packed), width):
                parent = child_key(parent, packed[start : start + width])
                keys.append(parent)
        return keys[block]

    def keys(self, first: int, end: int) -> list[BlockKey]:
        """Return the keys of blocks [first, end), which were hashed before."""
        return self._keys[first:end]

    def keys_of(self, blocks: Slots) -> list[BlockKey]:
        """Return the keys of these blocks, which were hashed before."""
        if not len(blocks):
            return []
        first, end = int(blocks[0]), int(blocks[-1]) + 1
        if end - first == len(blocks):
            return self._keys[first:end]
        return SlotIndex(blocks).items_of(self._keys)

    def held(self) -> SlotIndex:
        """Return all slots as an index. The index of a long table is kept until the table changes."""
        if self._held is not None:
            return self._held
        held = SlotIndex(as_slots(self.slots))
        if len(held) >= MIN_NUMPY_SLOTS:
            self._held = held
        return held

    def published(self) -> SlotIndex:
        """Return the slots of the leading blocks that are keyed and canonical."""
        return self.held().head(self.num_published)

    def hash_some(self, blocks: int, block_size: int, budget: StepBudget) -> bool:
        """Hash the first `blocks` blocks, as far as the step's budget goes. Return True if all are hashed."""
        known = len(self._keys)
        if blocks > known:
            now = budget.take_hashes(blocks - known)
            if now:
                self.key(known + now - 1, block_size)
        return len(self._keys) >= blocks

    def misnamed(self, key_of: Callable[[SlotId], BlockKey | None], block_size: int) -> int | None:
        """Return the first block whose slot has not the key that it should have; None if all have. For checks."""
        restore, covered, flying = self.restore, self.num_published, set[int]()
        if restore is not None:
            covered, flying = restore.covered, restore.flying()
        for block, slot in enumerate(self.slots):
            key = key_of(SlotId(slot))
            # Behind a part of a restore that failed, other parts may have landed; they are given up at the end.
            may_have_landed = restore is not None and not restore.is_whole and block >= covered and key is not None
            is_named = may_have_landed or (block < covered and block not in flying)
            if key != (self.key(block, block_size) if is_named else None):
                return block
        return None
