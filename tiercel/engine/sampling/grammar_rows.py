"""The grammars of all rows, and the tokens that they allow."""

import numpy as np
import torch
from llguidance import LLExecutor
from numpy.typing import NDArray

from tiercel.engine.sampling.grammar import Grammar, GrammarRow
from tiercel.values.clock import Clock

Failures = tuple[tuple[int, str], ...]
"""Rows of a call whose grammar has failed: index into the call's rows, and why."""

_MOST_THREADS = 8
_USUAL_S = 50e-6  # of one mask


class GrammarRows:
    """The progress of every row that has a grammar. The lane's thread fills masks, after the rows have advanced."""

    def __init__(self, max_rows: int, vocab_size: int, clock: Clock) -> None:
        self._rows: list[GrammarRow | None] = [None] * max_rows
        self._vocab_size = vocab_size
        self._clock = clock
        self._executor: LLExecutor | None = None
        self.num_masks = 0  # since the start
        self.mask_s = 0.0  # spent computing them

    def set_row(self, row: int, grammar: Grammar | None, outputs: NDArray[np.uint32]) -> None:
        """Start a row whose output begins with these tokens. Without a compiled grammar the row fails."""
        self._rows[row] = GrammarRow(None) if grammar is None else grammar.open_row(outputs.tolist())

    def clear_row(self, row: int) -> None:
        """Forget the grammar of a row."""
        self._rows[row] = None

    def take(self, row_ids: NDArray[np.int64]) -> list[GrammarRow | None]:
        """Return the grammars of rows, which stay valid when the rows are given to other sequences."""
        return [self._rows[row] for row in row_ids.tolist()]

    def words(self, row_ids: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return one bit per token that may be drawn next. Rows without a grammar may draw all.

        Shapes: row_ids [M]; returns [M, vocab / 32, rounded up], a line contiguous.
        """
        start_s = self._clock.now_s()
        rows = self.take(row_ids)
        needed = -(-self._vocab_size // 32)
        # A tokenizer may have more ids than the model has logits.
        words = np.full((len(rows), max(needed, *(row.num_words for row in rows if row), 0)), -1, np.int32)
        together = [(row, index) for index, row in enumerate(rows) if row is not None and row.is_quick]
        if len(together) < 2:
            together.clear()
        else:
            self._fill_together(together, words)
        done = {index for _, index in together}
        for index, row in enumerate(rows):
            if row is not None and index not in done:
                row.fill(words[index])
        self.num_masks += sum(row is not None for row in rows)
        self.mask_s += self._clock.now_s() - start_s
        return words[:, :needed]

    def _fill_together(self, rows: list[tuple[GrammarRow, int]], words: NDArray[np.int32]) -> None:
        """Compute the masks of several rows on several threads, each into the line of its index.

        The time of a single row is not known then. Each is charged with that of the call, less what the others usually
        take; a row that has used up its time is computed alone from then on.
        """
        if self._executor is None:
            self._executor = LLExecutor(min(torch.get_num_threads(), _MOST_THREADS))
        start_s = self._clock.now_s()
        matchers = [(row.matcher, index) for row, index in rows]
        self._executor.unsafe_compute_mask_ptr(matchers, words.ctypes.data, words.strides[0], len(words))
        took_s = max(0.0, self._clock.now_s() - start_s - _USUAL_S * (len(rows) - 1))
        for row, index in rows:
            row.note_mask(took_s, words[index])


def advance(rows: list[GrammarRow | None], tokens: list[int]) -> Failures:
    """Give each row the token that was drawn for it. Return the rows whose grammar has failed, now or before."""
    failures: list[tuple[int, str]] = []
    for index, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        if row is not None:
            row.advance(token)
            if row.error:
                failures.append((index, row.error))
    return tuple(failures)
