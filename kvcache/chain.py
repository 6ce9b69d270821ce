"""Which finished chains go to the disk, and how much may be written a day."""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable

from tiercel.ids import BlockKey
from tiercel.kvcache.pool import KEY_BYTES

_MAX_CHAINS = 4096
_KEPT = 0.75  # of the keys that may be kept, after the cheapest chains were forgotten
_DAY_S = 86_400.0


class Chain:
    """A finished sequence's blocks, head first: a tail without its head can never be hit.

    The keys lie packed in one run of bytes, as so many chains may wait.
    """

    __slots__ = ("_keys", "brought", "cursor", "is_once", "saving_s")

    def __init__(self, keys: Iterable[BlockKey], saving_s: float, *, is_once: bool) -> None:
        self._keys = b"".join(keys)
        self.saving_s = saving_s  # what loading it instead of computing it again would save
        self.is_once = is_once  # nobody has come back for it so far
        self.brought = -1  # where the cursor stood when blocks were last sent down for it
        self.cursor = 0  # blocks before are on the disk, or on their way

    def __len__(self) -> int:
        """Blocks."""
        return len(self._keys) // KEY_BYTES

    def __getitem__(self, block: int) -> BlockKey:
        """The key of a block."""
        return BlockKey(self._keys[KEY_BYTES * block : KEY_BYTES * (block + 1)])

    def keys(self, first: int, end: int) -> list[BlockKey]:
        """The keys of blocks [first, end), as far as there are any."""
        return [self[block] for block in range(max(0, first), min(end, len(self)))]


_Entry = tuple[bool, float, int, Chain]


class ChainQueue:
    """Chains by expected saving: those that were reused before those seen once, the dearest to compute first.

    They keep at most `most_keys` keys together: a chain can only be written while its blocks lie in memory, so keys
    beyond a small multiple of the blocks of memory are of no use. What is not in memory any more is forgotten first,
    then the cheapest, and of equals the oldest.
    """

    def __init__(self, max_keys: int, is_at_hand: Callable[[Chain], bool] = lambda _: True) -> None:
        """`is_at_hand`: the next block of a chain can still be written."""
        self._max_keys = max_keys
        self._is_at_hand = is_at_hand
        self._num_keys = 0
        self._heap: list[_Entry] = []
        self._aside: list[_Entry] = []  # a heap too
        self._ids = itertools.count(0, -1)  # of equals the newest goes first: its blocks are the last to be evicted

    def __len__(self) -> int:
        """Chains that could go now; those set aside do not count."""
        return len(self._heap)

    @property
    def num_aside(self) -> int:
        """Chains that wait for a block to come down."""
        return len(self._aside)

    @property
    def num_keys(self) -> int:
        """Keys of all chains, of those set aside too."""
        return self._num_keys

    @property
    def first(self) -> Chain | None:
        """The one that is worth most."""
        return self._heap[0][3] if self._heap else None

    def push(self, chain: Chain) -> None:
        """A chain ended. The cheapest are forgotten when there are too many, or too many keys."""
        heapq.heappush(self._heap, (chain.is_once, -chain.saving_s, next(self._ids), chain))
        self._num_keys += len(chain)
        if self._num_keys > self._max_keys or len(self._heap) + len(self._aside) > _MAX_CHAINS:
            self._forget()

    def pop(self) -> None:
        """The first is done, or not to be had any more."""
        self._num_keys -= len(heapq.heappop(self._heap)[3])

    def set_aside(self) -> None:
        """The first waits until its next block can be read."""
        heapq.heappush(self._aside, heapq.heappop(self._heap))

    def recall(self, maximum: int) -> None:
        """Blocks have come: look again at the best of what was set aside."""
        for _ in range(min(maximum, len(self._aside))):
            heapq.heappush(self._heap, heapq.heappop(self._aside))

    def clear(self) -> None:
        """Nothing can be written any more."""
        self._heap.clear()
        self._aside.clear()
        self._num_keys = 0

    def _forget(self) -> None:
        """Keep the best chains that can still be written, as many as fill a part of the room."""
        kept, keys = set[int](), 0
        alive = (entry for entry in sorted(self._heap + self._aside) if self._is_at_hand(entry[3]))
        for number, (_, _, identity, chain) in enumerate(alive):
            if number >= _KEPT * _MAX_CHAINS or (number and keys + len(chain) > _KEPT * self._max_keys):
                break
            kept.add(identity)
            keys += len(chain)
        self._num_keys = keys
        for heap in (self._heap, self._aside):
            heap[:] = [entry for entry in heap if entry[2] in kept]
            heapq.heapify(heap)


class WrittenChains:
    """Chains that were written, oldest first, with at most so many keys together: the oldest are forgotten."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._num_keys = 0
        self._chains: deque[Chain] = deque()

    @property
    def num_keys(self) -> int:
        """Keys of all of them."""
        return self._num_keys

    @property
    def first(self) -> Chain | None:
        """The oldest."""
        return self._chains[0] if self._chains else None

    def push(self, chain: Chain) -> None:
        """A chain has been written."""
        self._chains.append(chain)
        self._num_keys += len(chain)
        while self._num_keys > self._max_keys and len(self._chains) > 1:
            self.pop()

    def pop(self) -> None:
        """The oldest is done."""
        self._num_keys -= len(self._chains.popleft())


class WriteBudget:
    """A token bucket of block writes: it holds a day's worth, starts full and fills evenly. An SSD wears out."""

    def __init__(self, daily_blocks: int) -> None:
        self._daily = daily_blocks
        self._tokens = float(daily_blocks)
        self._refilled_s: float | None = None

    @property
    def blocks(self) -> int | None:
        """Blocks that may be written now; None: as many as there are."""
        return int(self._tokens) if self._daily else None

    def change(self, daily_blocks: int) -> None:
        """Another cap from now on; what was written of the old one counts."""
        spent = self._daily - self._tokens if self._daily else 0.0
        self._daily = daily_blocks
        self._tokens = max(0.0, daily_blocks - spent)

    def spend(self, blocks: int = 1) -> None:
        """Blocks are written."""
        self._tokens -= blocks

    def refill(self, now_s: float) -> None:
        """Time has passed."""
        if self._refilled_s is not None:
            gained = self._daily * (now_s - self._refilled_s) / _DAY_S
            self._tokens = min(float(self._daily), self._tokens + gained)
        self._refilled_s = now_s
