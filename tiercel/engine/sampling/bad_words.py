"""Token sequences that a row must not complete: bad_words."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiercel.engine.sampling.upload import CopyLink, HostLink
from tiercel.values.request import MAX_BAD_WORD_TOKENS

_DEPTH = MAX_BAD_WORD_TOKENS - 1  # tokens before the last one of a sequence
_NOTHING = -1  # in the place of a token that the row has not said yet
_ANY = -2  # before the beginning of a sequence


class BadWords:
    """Excludes the last token of a bad sequence where the tokens before it are the last outputs of the row.

    The outputs are on the device, because a step is sampled before the host has seen the token of the step before.
    Memory is allocated when the first row has bad words: 8 bytes * max_rows * (MAX_BAD_WORD_TOKENS - 1).
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device, link: HostLink | None = None) -> None:
        self._max_rows = max_rows
        self._vocab_size = vocab_size
        self._device = device
        self._link = link or CopyLink(device)
        self._said: Tensor | None = None  # [max_rows, _DEPTH] int64, the last outputs, the newest in the last column
        self._begins: dict[int, NDArray[np.int64]] = {}  # of each row: [B, _DEPTH] the tokens before the last one
        self._ends: dict[int, NDArray[np.int64]] = {}  # of each row: [B] the last tokens

    def set_row_no_sync(self, row: int, words: tuple[tuple[int, ...], ...], outputs: NDArray[np.uint32]) -> None:
        """Replace the sequences and the last outputs of a row. Cost: one small upload."""
        begins = np.full((len(words), _DEPTH), _ANY, np.int64)
        for begin, word in zip(begins, words, strict=True):
            begin[_DEPTH - len(word) + 1 :] = word[:-1]
        self._begins[row], self._ends[row] = begins, np.array([word[-1] for word in words], np.int64)
        said = np.full(_DEPTH, _NOTHING, np.int64)
        last = outputs[-_DEPTH:]
        said[_DEPTH - len(last) :] = last
        self._outputs()[row] = self._link.send_no_sync(said)

    def apply_no_sync(self, scores: Tensor, places: NDArray[np.int64], row_ids: NDArray[np.int64]) -> None:
        """Exclude tokens. Shapes: scores [M, vocab], changed; places [B] among the M, of rows [B] with bad words."""
        counts = [len(self._ends[row]) for row in row_ids.tolist()]
        begins = self._link.send_no_sync(np.concatenate([self._begins[row] for row in row_ids.tolist()]))
        ends = np.concatenate([self._ends[row] for row in row_ids.tolist()])
        said = self._outputs().index_select(0, self._link.send_no_sync(np.repeat(row_ids, counts)))
        is_next = ((said == begins) | (begins == _ANY)).all(dim=1)
        shifts = torch.zeros(len(ends), device=self._device).masked_fill_(is_next, -torch.inf)
        flat_ids = self._link.send_no_sync(np.repeat(places, counts) * self._vocab_size + ends)
        scores.view(-1).scatter_add_(0, flat_ids, shifts)

    def note_no_sync(self, rows: Tensor, tokens: Tensor) -> None:
        """Note one drawn token per row. Shapes: rows, tokens [M] int64 on the device."""
        said = self._outputs()
        said.index_copy_(0, rows, torch.cat((said.index_select(0, rows)[:, 1:], tokens[:, None]), dim=1))

    def _outputs(self) -> Tensor:
        if self._said is None:
            shape = (self._max_rows, _DEPTH)
            self._said = torch.full(shape, _NOTHING, dtype=torch.int64, device=self._device)
        return self._said
