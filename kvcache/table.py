"""The block table of one sequence."""

from array import array
from collections.abc import Callable, Iterable

import numpy as np
from msgspec import Struct

from tiercel.ids import BlockKey, SeqId, SlotId
from tiercel.kvcache.block_key import child_key
from tiercel.kvcache.pool import SlotPool
from tiercel.kvcache.prefix import Prefix
from tiercel.kvcache.slot_index import MIN_NUMPY_SLOTS, NO_SLOTS, SlotIndex, Slots, as_slots
from tiercel.kvcache.step_budget import StepBudget
from tiercel.kvcache.tenant_holding import TenantHolding


class RetainedCopies(Struct, frozen=True, gc=False):
    """Slots of the tier below, in the order of their blocks, and their lives as of when they were looked up."""

    slots: Slots
    lives: Slots


NO_COPIES = RetainedCopies(NO_SLOTS, NO_SLOTS)


class Restore:
    """Blocks of one sequence on their way up. Until they have landed its table holds slots without bytes."""

    __slots__ = ("blocks_by_transfer", "covered", "first", "is_whole", "landed", "replaced")

    def __init__(self, covered: int, blocks_by_transfer: dict[int, Slots]) -> None:
        self.covered = covered  # leading blocks that will hold bytes
        self.blocks_by_transfer = blocks_by_transfer  # the numbers of the blocks that still fly
        self.first = min(int(blocks[0]) for blocks in blocks_by_transfer.values())  # the first that came up
        self.landed = 0  # blocks that have come up
        self.is_whole = True  # no part of it has failed
        self.replaced: list[int] = []  # slots of others that it got, because they were named first

    def flying(self) -> set[int]:
        """Return the numbers of the blocks that still fly."""
        return {block for blocks in self.blocks_by_transfer.values() for block in blocks.tolist()}


class Fetch:
    """What was brought near for a waiting sequence: asked for once a wait, so that nobody waits for ever."""

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
        self.cursor = 0  # blocks of the chain looked at
        self.landed = 0  # blocks of them that have been seen in reach
        self.is_hashed = False  # all keys are known: from now on only the disk holds it up
        self.is_queued = False  # its next read waits until others have landed
        self.is_done = False  # nothing more is asked for
        self.is_given_up = False  # the sequence waits for no read any more
        self.passed_over_s: float | None = None  # since when the sequence could run but for its fetch
        self.predicted_s = 0.0  # what the reads were to take
        self.worth_until = 0  # blocks before are worth reading
        self.reads: set[BlockKey] = set()  # that fly for it
        self.runs: list[
            RetainedCopies
        ] = []  # kept from eviction while it waits: runs of blocks that lay in the device tier
        self._slots, self._lives = array("q"), array("q")  # the same, of blocks that were found or landed one by one

    def want(self, slot: int, pool: SlotPool) -> None:
        """A copy in the gateway is kept from eviction for the sequence."""
        self._slots.append(slot)
        self._lives.append(int(pool.lives[slot]))

    def wanted(self) -> RetainedCopies:
        """Return all copies that are kept from eviction for the sequence."""
        slots, lives = np.array(self._slots, np.intp), np.array(self._lives, np.int64)
        return RetainedCopies(
            np.concatenate([slots, *(run.slots for run in self.runs)]),
            np.concatenate([lives, *(run.lives for run in self.runs)]),
        )

    def give_up(self) -> None:
        """The sequence takes what has landed and waits for no read any more."""
        self.is_done = self.is_given_up = True


class Reuse(Struct, frozen=True, gc=False):
    """Tokens of one sequence that were not computed because a lower tier had them."""

    loaded_tokens: int = 0  # restored from DDR before it first ran, whatever brought them there
    fetched_tokens: int = 0  # read from SSD before it first ran
    swapped_tokens: int = 0  # that came up after it had given way


NO_REUSE = Reuse()


class BlockTable:
    """One sequence's slots in order and the keys of its full blocks. Written by the CacheManager only.

    `tokens` is the sequence's own array of token ids, which only grows; the table reads it.
    """

    __slots__ = (
        "_held",
        "_keys",
        "_root",
        "copied_s",
        "fetch",
        "has_given_way",
        "holding",
        "is_closed",
        "kept",
        "last_step",
        "num_fetched",
        "num_loaded",
        "num_published",
        "num_saved",
        "num_swapped",
        "owner",
        "prefix",
        "restore",
        "seq",
        "slots",
        "tokens",
    )

    def __init__(self, seq: SeqId, root: BlockKey, tokens: "array[int]", owner: int, holding: TenantHolding) -> None:
        self.seq = seq
        self.tokens = tokens
        self.slots: array[int] = array("i")
        self.num_published = 0  # leading blocks that are keyed and canonical
        self.retained = NO_COPIES  # those copies
        self.prefix = Prefix()  # what a waiting sequence was found to have in reach
        self.num_saved = 0  # leading blocks that were offered to a lower tier
        self.last_step = 0  # last launched step with a slice of this sequence
        self.owner = owner  # whose blocks these are, for the floors of eviction
        self.holding = holding  # of all tables of the tenant
        self.restore: Restore | None = None  # flying
        self.fetch = Fetch()  # of this wait
        self.is_closed = False  # its sequence has ended
        self.has_given_way = False  # it held blocks once and lost them
        self.num_loaded = 0  # blocks restored from DDR before that
        self.num_fetched = 0  # blocks read from SSD before that
        self.num_swapped = 0  # blocks that came up after it
        self.copied_s = 0.0  # that copies of its blocks took since it gave way the last time
        self._root = root
        self._held: SlotIndex | None = None  # all slots, as long as they do not change
        self._keys: list[BlockKey] = []  # only grows: tokens never change

    # ---- slots

    def extend(self, slots: Iterable[int]) -> None:
        """Hold these slots behind the others."""
        first, self._held = len(self.slots), None
        if isinstance(slots, np.ndarray):
            self.slots.frombytes(slots.astype(np.int32).tobytes())
        else:
            self.slots.extend(slots)
        self.holding.add(self.slots[first:])

    def replace(self, block: int, slot: int) -> None:
        """Hold another slot with the same bytes."""
        self._held = None
        self.holding.remove((self.slots[block],))
        self.slots[block] = slot
        self.holding.add((slot,))

    def cut(self, blocks: int) -> None:
        """Hold the first `blocks` slots alone."""
        self.holding.remove(self.slots[blocks:] if blocks else self.held())
        self.slots, self._held = self.slots[:blocks], None

    # ---- facts

    def reuse(self, block_size: int) -> Reuse:
        """What lower tiers have brought it."""
        if not (self.num_loaded or self.num_fetched or self.num_swapped):
            return NO_REUSE
        return Reuse(self.num_loaded * block_size, self.num_fetched * block_size, self.num_swapped * block_size)

    def key(self, block: int, block_size: int) -> BlockKey:
        """The key of block number `block`, all of whose tokens are known. Cost: hashes the chain up to it once."""
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
        """Return all slots as an index. A table of few blocks is looked at again each time."""
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
        """Hash up to block number `blocks`, as far as the step's budget goes. True when all are hashed."""
        known = len(self._keys)
        if blocks > known:
            now = budget.take_hashes(blocks - known)
            if now:
                self.key(known + now - 1, block_size)
        return len(self._keys) >= blocks

    def misnamed(self, key_of: Callable[[SlotId], BlockKey | None], block_size: int) -> int | None:
        """Return the first block whose slot does not bear the name that it should; None when all do. For checks."""
        restore, covered, flying = self.restore, self.num_published, set[int]()
        if restore is not None:
            covered, flying = restore.covered, restore.flying()
        for block, slot in enumerate(self.slots):
            key = key_of(SlotId(slot))
            # Behind a part of a restore that has failed others may have landed: they are given up with the last one.
            may_have_landed = restore is not None and not restore.is_whole and block >= covered and key is not None
            is_named = may_have_landed or (block < covered and block not in flying)
            if key != (self.key(block, block_size) if is_named else None):
                return block
        return None
