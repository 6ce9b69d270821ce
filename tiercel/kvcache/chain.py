"""The finished chains that may go to the disk, and how much may be written in a day."""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable

from tiercel.kvcache.key_index import KEY_BYTES
from tiercel.values.ids import BlockKey

_MAX_CHAINS = 4096
_KEPT_SHARE = 0.75  # of the limits on chains and keys, once the cheapest chains are forgotten
_DAY_S = 86_400.0


class Chain:
    """The keys of a finished sequence's blocks, head first: a tail without its head can never be hit.

    The keys are packed into one bytes object, because thousands of chains may wait.
    """

    __slots__ = ("_keys", "brought", "cursor", "is_once", "saving_s")

    def __init__(self, keys: Iterable[BlockKey], saving_s: float, *, is_once: bool) -> None:
        self._keys = b"".join(keys)
        self.saving_s = saving_s  # computing time that loading the chain would save
        self.is_once = is_once  # no request has hit the chain so far
        self.brought = -1  # where the cursor stood when blocks were last sent down for the chain
        self.cursor = 0  # blocks before this one are on the disk, or on their way

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._keys) // KEY_BYTES

    def __getitem__(self, block: int) -> BlockKey:
        """Return the key of a block."""
        return BlockKey(self._keys[KEY_BYTES * block : KEY_BYTES * (block + 1)])

    def keys(self, first: int, end: int) -> list[BlockKey]:
        """Return the keys of those of the blocks [first, end) that exist."""
        return [self[block] for block in range(max(0, first), min(end, len(self)))]


_Entry = tuple[bool, float, int, Chain]


class ChainQueue:
    """Chains by expected saving: reused chains before those seen once, and the most expensive to compute first.

    The queue keeps at most `max_keys` keys: a chain can only be written while its blocks lie in memory, so keys beyond
    a small multiple of the blocks of memory are of no use. Chains that are not in memory any more are forgotten first,
    then the cheapest, and of equal ones the oldest.
    """

    def __init__(self, max_keys: int, is_at_hand: Callable[[Chain], bool] = lambda _: True) -> None:
        """`is_at_hand` says whether the next block of a chain can still be written."""
        self._max_keys = max_keys
        self._is_at_hand = is_at_hand
        self._num_keys = 0
        self._heap: list[_Entry] = []
        self._aside: list[_Entry] = []  # a heap too
        self._ids = itertools.count(0, -1)  # of equal chains the newest goes first: its blocks are evicted last

    def __len__(self) -> int:
        """Return the number of chains that could be written now, without those set aside."""
        return len(self._heap)

    @property
    def num_aside(self) -> int:
        """Chains that wait for a block to come down to the gateway."""
        return len(self._aside)

    @property
    def num_keys(self) -> int:
        """Keys of all chains, including those set aside."""
        return self._num_keys

    @property
    def first(self) -> Chain | None:
        """The chain with the highest expected saving."""
        return self._heap[0][3] if self._heap else None

    def push(self, chain: Chain) -> None:
        """Add a chain. If there are too many chains or keys, the cheapest chains are forgotten."""
        heapq.heappush(self._heap, (chain.is_once, -chain.saving_s, next(self._ids), chain))
        self._num_keys += len(chain)
        if self._num_keys > self._max_keys or len(self._heap) + len(self._aside) > _MAX_CHAINS:
            self._forget()

    def pop(self) -> None:
        """Remove the first chain, which is written or not in memory any more."""
        self._num_keys -= len(heapq.heappop(self._heap)[3])

    def set_aside(self) -> None:
        """Set the first chain aside until its next block can be read from the gateway."""
        heapq.heappush(self._aside, heapq.heappop(self._heap))

    def recall(self, maximum: int) -> None:
        """Queue the best of the chains that were set aside again, because blocks have come."""
        for _ in range(min(maximum, len(self._aside))):
            heapq.heappush(self._heap, heapq.heappop(self._aside))

    def clear(self) -> None:
        """Forget all chains."""
        self._heap.clear()
        self._aside.clear()
        self._num_keys = 0

    def _forget(self) -> None:
        """Keep the best chains that can still be written, up to a share of the limits."""
        kept, keys = set[int](), 0
        alive = (entry for entry in sorted(self._heap + self._aside) if self._is_at_hand(entry[3]))
        for number, (_, _, identity, chain) in enumerate(alive):
            if number >= _KEPT_SHARE * _MAX_CHAINS or (number and keys + len(chain) > _KEPT_SHARE * self._max_keys):
                break
            kept.add(identity)
            keys += len(chain)
        self._num_keys = keys
        for heap in (self._heap, self._aside):
            heap[:] = [entry for entry in heap if entry[2] in kept]
            heapq.heapify(heap)


class WrittenChains:
    """Chains that were written, oldest first. If they have more than `max_keys` keys, the oldest are forgotten."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._num_keys = 0
        self._chains: deque[Chain] = deque()

    @property
    def num_keys(self) -> int:
        """Keys of all chains."""
        return self._num_keys

    @property
    def first(self) -> Chain | None:
        """The oldest chain."""
        return self._chains[0] if self._chains else None

    def push(self, chain: Chain) -> None:
        """Add a chain that has been written."""
        self._chains.append(chain)
        self._num_keys += len(chain)
        while self._num_keys > self._max_keys and len(self._chains) > 1:
            self.pop()

    def pop(self) -> None:
        """Remove the oldest chain."""
        self._num_keys -= len(self._chains.popleft())


class WriteBudget:
    """A token bucket of block writes: it holds the writes of a day, starts full and fills evenly. SSDs wear out."""

    def __init__(self, daily_blocks: int) -> None:
        self.daily_blocks = daily_blocks  # 0: no limit
        self._tokens = float(daily_blocks)
        self._refilled_s: float | None = None

    @property
    def blocks(self) -> int | None:
        """Blocks that may be written now; None: no limit."""
        return int(self._tokens) if self.daily_blocks else None

    def change(self, daily_blocks: int) -> None:
        """Set another limit. Blocks written under the old limit count."""
        spent = self.daily_blocks - self._tokens if self.daily_blocks else 0.0
        self.daily_blocks = daily_blocks
        self._tokens = max(0.0, daily_blocks - spent)

    def spend(self, blocks: int = 1) -> None:
        """Take blocks that are written from the bucket."""
        self._tokens -= blocks

    def refill(self, now_s: float) -> None:
        """Fill the bucket for the time that has passed."""
        if self._refilled_s is not None:
            gained = self.daily_blocks * (now_s - self._refilled_s) / _DAY_S
            self._tokens = min(float(self.daily_blocks), self._tokens + gained)
        self._refilled_s = now_s
