"""Which finished chains go to the disk, and how much may be written a day."""

import heapq
import itertools

from tiercel.ids import BlockKey

_MOST_CHAINS = 4096
_DAY_S = 86_400.0


class Chain:
    """A finished sequence's blocks, head first: a tail without its head can never be hit."""

    __slots__ = ("brought", "cursor", "is_once", "keys", "saving_s")

    def __init__(self, keys: tuple[BlockKey, ...], saving_s: float, *, is_once: bool) -> None:
        self.keys = keys
        self.saving_s = saving_s  # what loading it instead of computing it again would save
        self.is_once = is_once  # nobody has come back for it so far
        self.brought = -1  # where the cursor stood when blocks were last sent down for it
        self.cursor = 0  # blocks before are on the disk, or on their way


class ChainQueue:
    """Chains by expected saving: those that were reused before those seen once, the dearest to compute first."""

    def __init__(self) -> None:
        self._heap: list[tuple[bool, float, int, Chain]] = []
        self._aside: list[tuple[bool, float, int, Chain]] = []  # a heap too
        self._ids = itertools.count()

    def __len__(self) -> int:
        """Chains that could go now; those set aside do not count."""
        return len(self._heap)

    @property
    def num_aside(self) -> int:
        """Chains that wait for a block to come down."""
        return len(self._aside)

    @property
    def first(self) -> Chain | None:
        """The one that is worth most."""
        return self._heap[0][3] if self._heap else None

    def push(self, chain: Chain) -> None:
        """A chain ended. The cheapest are forgotten when there are too many."""
        heapq.heappush(self._heap, (chain.is_once, -chain.saving_s, next(self._ids), chain))
        if len(self._heap) > _MOST_CHAINS:
            self._heap = heapq.nsmallest(_MOST_CHAINS // 2, self._heap)

    def pop(self) -> None:
        """The first is done, or not to be had any more."""
        heapq.heappop(self._heap)

    def set_aside(self) -> None:
        """The first waits until its next block can be read."""
        entry = heapq.heappop(self._heap)
        if len(self._aside) < _MOST_CHAINS:
            heapq.heappush(self._aside, entry)

    def recall(self, most: int) -> None:
        """Blocks have come: look again at the best of what was set aside."""
        for _ in range(min(most, len(self._aside))):
            heapq.heappush(self._heap, heapq.heappop(self._aside))

    def clear(self) -> None:
        """Nothing can be written any more."""
        self._heap.clear()
        self._aside.clear()


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
