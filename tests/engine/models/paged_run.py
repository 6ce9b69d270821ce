"""A minimal engine for tests of models and backends: one arena, fixed block tables, any slicing."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tiercel.engine.forward.state import ForwardState
from tiercel.engine.models.base import Model


class PagedRun:
    """Several sequences in one arena, with slots in random order."""

    def __init__(self, model: Model, sequences: int, length: int, block_size: int = 16, seed: int = 0) -> None:
        blocks = -(-length // block_size)
        order = torch.randperm(sequences * blocks, generator=torch.Generator().manual_seed(seed)) + 1
        shape = (sequences * blocks + 1, model.layers, block_size, model.kv_heads, 2 * model.head_dim)
        self.tables = order.view(sequences, blocks)
        # NaN, because rows that were not written must not be read
        self.kv = torch.full(shape, float("nan"), dtype=model.precision.kv)
        self._model = model
        self._block_size = block_size

    def step(self, pieces: Sequence[tuple[int, int, Tensor]]) -> list[Tensor]:
        """Run a forward of (sequence, tokens computed before, new tokens). Return the logits of each piece's tokens."""
        rows = [sequence for sequence, _, _ in pieces]
        starts = [start for _, start, _ in pieces]
        ends = [start + len(tokens) for _, start, tokens in pieces]
        state = ForwardState.of_slices(self.tables[rows], starts, ends, self._block_size)
        with torch.inference_mode():
            hidden = self._model.forward(torch.cat([tokens for _, _, tokens in pieces]), self.kv, state)
            logits = self._model.logits(hidden)
        return list(logits.split([len(tokens) for _, _, tokens in pieces]))

    def prefill(self, tokens: Tensor, chunk: int, sequence: int = 0) -> Tensor:
        """Return the logits of a whole prompt, computed in slices of `chunk` tokens."""
        parts = [
            self.step([(sequence, start, tokens[start : start + chunk])])[0] for start in range(0, len(tokens), chunk)
        ]
        return torch.cat(parts)
