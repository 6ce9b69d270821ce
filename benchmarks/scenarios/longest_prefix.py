"""Pure longest-prefix-match: how many prefix hits there are to be had. A yardstick, not for use: it starves tenants."""

from collections.abc import Container, Iterator

from tiercel.ids import SeqId
from tiercel.kvcache.manager import CacheManager
from tiercel.scheduler.account import Account
from tiercel.scheduler.book import SequenceBook
from tiercel.scheduler.cost import StepCosts
from tiercel.scheduler.fairness import NoFairness
from tiercel.scheduler.policy import Policy


class LongestPrefix(Policy):
    """Who finds the most of its prompt in the cache goes first, whoever it is; then who came first."""

    def __init__(self, costs: StepCosts) -> None:
        super().__init__("fcfs", costs, NoFairness(), None)
        self._book: SequenceBook | None = None
        self._cache: CacheManager | None = None
        self._drawn: tuple[float, list[SeqId]] = (-1.0, [])

    def watch(self, book: SequenceBook, cache: CacheManager) -> None:
        """The books that it looks into."""
        self._book, self._cache = book, cache

    def candidates(self, now_s: float, closed: Container[Account] = ()) -> Iterator[SeqId]:
        """All anew at every moment, no account closed. Cost: O(waiting), and hashing one prompt of each beginning."""
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
