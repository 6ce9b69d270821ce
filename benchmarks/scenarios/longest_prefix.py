"""Pure longest-prefix-match, as a yardstick for prefix hits. It starves tenants and is not for use."""

from collections.abc import Container, Iterator

from tiercel.kvcache.manager import CacheManager
from tiercel.scheduler.account import Account
from tiercel.scheduler.book import SequenceBook
from tiercel.scheduler.cost import StepCosts
from tiercel.scheduler.fairness import NoFairness
from tiercel.scheduler.policy import Policy
from tiercel.values.ids import SeqId


class LongestPrefix(Policy):
    """Orders sequences by the length of their cached prefix, then by arrival."""

    def __init__(self, costs: StepCosts) -> None:
        super().__init__("fcfs", costs, NoFairness(), None)
        self._book: SequenceBook | None = None
        self._cache: CacheManager | None = None
        self._drawn: tuple[float, list[SeqId]] = (-1.0, [])

    def watch(self, book: SequenceBook, cache: CacheManager) -> None:
        """Set the books that it reads."""
        self._book, self._cache = book, cache

    def candidates(self, now_s: float, closed: Container[Account] = ()) -> Iterator[SeqId]:
        """Yield all waiting sequences in order. Cost: O(waiting), and hashing one prompt of each prefix."""
        if self._drawn[0] != now_s:
            self._drawn = (now_s, self._draw())
        yield from self._drawn[1]

    def _draw(self) -> list[SeqId]:
        if self._book is None or self._cache is None:
            return []
        waiting = self._book.waiting
        near: dict[bytes, int] = {}
        for sequence in waiting.values():
            start = sequence.request.prompt[:8]
            if start not in near:
                near[start] = self._cache.peek(sequence.request.prompt, sequence.request.scope)
        begun = [one.id for one in self._book.running if one.id in self.queue]
        return begun + sorted(waiting, key=lambda seq: (-near[waiting[seq].request.prompt[:8]], seq))
