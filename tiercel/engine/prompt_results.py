"""The results of prompts on their way from steps to the HTTP process: in order, once, in bounded portions.

Imports no torch.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from tiercel.kvcache.manager import CacheManager
from tiercel.scheduler.book import SequenceBook
from tiercel.values.ids import SeqId
from tiercel.values.outcome import Pooled, PromptReading
from tiercel.wire.frames import Report

_PORTION_BYTES = 1 << 18
"""Log-probabilities in one report: the frame is far below its limit, and sockets and event loop are never busy long."""


class PromptResults:
    """Collects what committed steps have read from prompts.

    A position is reported once: when a sequence is preempted, and when a step is voided, `SequenceProgress.num_read`
    says where to go on. The sums of states for pooling are kept here until the prompt is complete.
    """

    def __init__(self, book: SequenceBook, cache: CacheManager) -> None:
        self._book = book
        self._cache = cache
        self._sum_by_seq: dict[SeqId, NDArray[np.float64]] = {}

    def open(self, seq: SeqId) -> None:
        """Note a new sequence in book and cache."""
        sequence = self._book[seq]
        if sequence.has_unread:
            self._cache.limit_reuse(seq, sequence.num_read)

    def close(self, seq: SeqId) -> None:
        """Forget a sequence that has ended."""
        self._sum_by_seq.pop(seq, None)

    def take(self, parts: Sequence[PromptReading]) -> Iterator[Report]:
        """Record the results of a step that is about to be committed, and yield the reports of them.

        Parts of sequences that have ended are left out.
        """
        for part in parts:
            if part.seq not in self._book:
                continue
            sequence = self._book[part.seq]
            if part.start > sequence.num_read or part.end <= sequence.num_read:
                continue  # of a slice that was launched before its sequence was preempted
            if not part.state_sum and part.start < sequence.num_read:
                part = part.cut(sequence.num_read, part.end)
            self._book.note_read(part.seq, part.end)
            self._cache.limit_reuse(part.seq, sequence.num_read if sequence.has_unread else None)
            if part.state_sum:
                yield from self._pool(part)
            else:
                yield from (Report(prompts=(portion,)) for portion in portions(part))

    def _pool(self, part: PromptReading) -> Iterator[Report]:
        """Add the states of a part, and yield the pooled vector when the prompt is complete."""
        state_sum = np.frombuffer(part.state_sum, np.float32).astype(np.float64)
        before = self._sum_by_seq.pop(part.seq, None)
        whole = state_sum if before is None else before + state_sum
        sequence = self._book[part.seq]
        if sequence.has_unread:
            self._sum_by_seq[part.seq] = whole
            return
        count = 1 if sequence.request.params.pooling == "last" else sequence.num_prompt
        yield Report(pooled=(Pooled(part.seq, (whole / count).astype(np.float32).tobytes()),))


def portions(part: PromptReading, limit_bytes: int = _PORTION_BYTES) -> Iterable[PromptReading]:
    """Cut log-probabilities into parts of about `limit_bytes`, at least one position each."""
    count = part.end - part.start
    per_portion = max(1, limit_bytes * count // max(1, part.num_bytes))
    for start in range(part.start, part.end, per_portion):
        yield part.cut(start, min(start + per_portion, part.end))
