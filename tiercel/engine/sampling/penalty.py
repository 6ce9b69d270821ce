"""The tokens that each row has seen, on the device, and their penalties."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiercel.engine.sampling.row import Column
from tiercel.engine.sampling.upload import CopyLink, HostLink


class PenaltyCounts:
    """The set of prompt tokens and the counts of output tokens of every row.

    Memory is allocated when the first row uses penalties: 5 bytes * max_rows * vocab_size.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device, link: HostLink | None = None) -> None:
        self._max_rows = max_rows
        self._vocab_size = vocab_size
        self._device = device
        self._link = link or CopyLink(device)
        self._prompt: Tensor | None = None  # [max_rows, vocab] bool
        self._outputs: Tensor | None = None  # [max_rows, vocab] int32

    def set_row_no_sync(self, row: int, prompt: NDArray[np.uint32], outputs: NDArray[np.uint32]) -> None:
        """Replace the counts of a row by those of its tokens.

        Cost: one upload of each list without duplicates, four small kernels.
        """
        seen, counts = self._tensors()
        first = row * self._vocab_size  # flat indices: on a GPU, indexed assignment of a scalar would wait for a copy
        seen[row] = False
        seen.view(-1).index_fill_(0, self._link.send_no_sync(first + self._distinct(prompt)[0]), True)
        tokens, times = self._distinct(outputs)
        counts[row] = 0
        flat_ids = self._link.send_no_sync(first + tokens)
        counts.view(-1).index_copy_(0, flat_ids, self._link.send_no_sync(times))

    def apply_no_sync(self, scores: Tensor, rows: Tensor, floats: Tensor) -> Tensor:
        """Return the scores after the repetition, frequency and presence penalties.

        The repetition penalty divides positive scores and multiplies negative ones, once, for tokens of the prompt
        and the output (arXiv 1909.05858 section 4.1). The other two are subtracted, for output tokens only.

        Shapes:  scores [M, vocab]; rows [M] int64 on the device; floats [M, len(Column)]; returns [M, vocab].
        """
        prompt, outputs = self._tensors()
        counts = outputs.index_select(0, rows)
        drawn = counts > 0
        seen = prompt.index_select(0, rows).logical_or_(drawn)
        repetition = floats[:, Column.REPETITION, None]
        penalised = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where(seen, penalised, scores)
        scores -= counts * floats[:, Column.FREQUENCY, None]
        scores -= drawn * floats[:, Column.PRESENCE, None]
        return scores

    def count_no_sync(self, rows: Tensor, tokens: Tensor) -> None:
        """Count one drawn token per row. Shapes: rows, tokens [M] int64 on the device."""
        counts = self._tensors()[1].view(-1)
        counts.scatter_add_(0, rows * self._vocab_size + tokens, torch.ones_like(tokens, dtype=torch.int32))

    def _tensors(self) -> tuple[Tensor, Tensor]:
        """Return prompt tokens and output counts, allocated on first use."""
        if self._prompt is None or self._outputs is None:
            shape = (self._max_rows, self._vocab_size)
            self._prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
            self._outputs = torch.zeros(shape, dtype=torch.int32, device=self._device)
        return self._prompt, self._outputs

    def _distinct(self, tokens: NDArray[np.uint32]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return each token id below the width of the logits, and how often it occurs."""
        ids, times = np.unique(tokens, return_counts=True)
        known = ids < self._vocab_size  # a tokenizer may have more ids than the logits
        return ids[known].astype(np.int64), times[known].astype(np.int32)
