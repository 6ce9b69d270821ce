"""The grammars of all rows, and the exclusion of tokens from their scores."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiercel.clock import Clock
from tiercel.engine.sampling.grammar import Grammar, GrammarRow
from tiercel.engine.sampling.upload import upload_no_sync

Failures = tuple[tuple[int, str], ...]
"""Rows of a call whose grammar has failed: index into the call's rows, and why."""

_ALL = np.int32(-1)  # every bit set: no token is excluded
_BITS = (np.arange(256)[:, None] >> np.arange(8)) & 1
_LIMITS = np.where(_BITS == 1, np.inf, -np.inf).astype(np.float32)  # [256, 8]: of the eight scores of each byte


class GrammarRows:
    """The progress of every row that has a grammar. The lane's thread fills masks, after the rows have advanced."""

    def __init__(self, max_rows: int, vocab_size: int, clock: Clock) -> None:
        self._rows: list[GrammarRow | None] = [None] * max_rows
        self._vocab_size = vocab_size
        self._clock = clock
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

        Shapes: row_ids [M]; returns [M, vocab / 32, rounded up].
        """
        start_s = self._clock.now_s()
        words = np.empty((len(row_ids), -(-self._vocab_size // 32)), np.int32)
        for target, row in zip(words, self.take(row_ids), strict=True):
            if row is None:
                target[:] = _ALL
            else:
                row.fill(target)
                self.num_masks += 1
        self.mask_s += self._clock.now_s() - start_s
        return words


def exclude_no_sync(scores: Tensor, words: NDArray[np.int32]) -> None:
    """Set the scores of tokens that may not be drawn to -inf.

    Shapes: scores [M, vocab], changed; words: see `GrammarRows.words`.
    """
    vocab_size = scores.shape[1]
    if scores.device.type == "cpu":
        # The minimum with the limits takes a fifth of the time of a masked fill, which branches.
        limits = np.take(_LIMITS, words.view(np.uint8), axis=0).reshape(len(words), -1)
        torch.minimum(scores, torch.from_numpy(limits)[:, :vocab_size], out=scores)
        return
    octets = upload_no_sync(words.view(np.uint8), scores.device)
    scores.masked_fill_(excluded_no_sync(octets, vocab_size), -torch.inf)


def excluded_no_sync(octets: Tensor, vocab_size: int) -> Tensor:
    """Return which tokens are excluded, computed on the device of the bits.

    Shapes: octets [M, 4 * words] uint8, the bytes of `GrammarRows.words`; returns [M, vocab_size] bool.
    Cost:   three kernels, two bytes of temporary memory per score.
    """
    places = torch.arange(8, dtype=torch.uint8, device=octets.device)
    return (((octets[:, :, None] >> places) & 1) == 0).view(len(octets), -1)[:, :vocab_size]


def can_draw_others(words: NDArray[np.int32], banned: NDArray[np.int64]) -> bool:
    """Return whether a row may draw a token that is not banned. Shapes: words of one row; banned [B], distinct ids."""
    allowed = int(np.bitwise_count(words.view(np.uint32)).sum())
    return allowed > int(np.count_nonzero((words[banned // 32] >> (banned % 32).astype(np.int32)) & 1))


def advance(rows: list[GrammarRow | None], tokens: list[int]) -> Failures:
    """Give each row the token that was drawn for it. Return the rows whose grammar has failed, now or before."""
    failures: list[tuple[int, str]] = []
    for index, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        if row is not None:
            row.advance(token)
            if row.error:
                failures.append((index, row.error))
    return tuple(failures)
