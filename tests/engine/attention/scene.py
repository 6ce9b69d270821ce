"""Sequences with histories in a paged cache, and the expected attention."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tiercel.engine.attention.base import Attention
from tiercel.engine.attention.cache_rows import write_rows
from tiercel.engine.attention.triton import TritonAttention
from tiercel.engine.forward.kv_cache import LIMIT_BY_DTYPE, dequantize, quantize, width_of
from tiercel.engine.forward.state import AttentionParams, ForwardState
from tiercel.engine.kernels.tiles import Tile

LAYERS, LAYER = 3, 1
CPU = torch.device("cpu")
KERNEL_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""The device of kernels; on the CPU they run in Triton's interpreter."""


def open_triton() -> TritonAttention:
    """Return the kernels with tiles so small that short contexts have several tiles and parts."""
    return TritonAttention(4, Tile(rows=64, keys=32, warps=4, stages=2), Tile(rows=16, keys=32, warps=4, stages=2))


def open_arena(slots: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return an arena without tokens: all NaN, in 8 bits with scales that are NaN."""
    shape = (slots, LAYERS, block_size, kv_heads, width_of(head_dim, dtype))
    return torch.full((*shape, dtype.itemsize), 0xFF, dtype=torch.uint8).view(dtype).squeeze(-1)


class Scene:
    """A step of sequences with histories, in an arena of several layers; rows that were not written are NaN.

    `pieces`: (tokens computed before, tokens of this step) of each sequence; no input is zero. `cache`: the type of the
    cache, if it is not `dtype`; the histories are then what a reader of the cache finds.
    """

    def __init__(
        self,
        pieces: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        seed: int = 0,
        kv_heads: int = 2,
        group: int = 3,
        head_dim: int = 32,
        block_size: int = 16,
        device: torch.device = CPU,
        cache: torch.dtype | None = None,
    ) -> None:
        cache = cache or dtype
        draw = torch.Generator().manual_seed(seed)
        lengths = [start + length for start, length in pieces]
        blocks = max(-(-length // block_size) for length in lengths)
        order = torch.randperm(len(pieces) * blocks, generator=draw) + 1
        tables = order.view(len(pieces), blocks)
        for index, length in enumerate(lengths):
            tables[index, -(-length // block_size) :] = 0  # the null block
        self.kv = open_arena(len(order) + 1, block_size, kv_heads, head_dim, cache)[:, LAYER]
        self.histories = [torch.randn(2, length, kv_heads, head_dim, generator=draw).to(dtype) for length in lengths]
        for (start, _), table, history in zip(pieces, tables, self.histories, strict=True):
            if start:
                state = ForwardState.of_slices(table[None], [0], [start], block_size)
                write_rows(history[0, :start], history[1, :start], self.kv, state)
        tokens = sum(length for _, length in pieces)
        self.query = torch.randn(tokens, kv_heads * group, head_dim, generator=draw).to(dtype)
        self.key, self.value = torch.cat(
            [history[:, start:] for (start, _), history in zip(pieces, self.histories, strict=True)], dim=1
        )
        self.state = ForwardState.of_slices(tables, [start for start, _ in pieces], lengths, block_size)
        if cache in LIMIT_BY_DTYPE:
            self.histories = [dequantize(*quantize(history, cache), torch.float64) for history in self.histories]
        if device != CPU:
            self.kv = self.kv._base.to(device)[:, LAYER]  # the other layers stay beside this one
            self.query, self.key, self.value = self.query.to(device), self.key.to(device), self.value.to(device)
            starts = [start for start, _ in pieces]
            self.state = ForwardState.of_slices(tables.to(device), starts, lengths, block_size)

    @property
    def heads(self) -> int:
        return self.query.shape[1]

    def attend(self, backend: Attention, params: AttentionParams) -> Tensor:
        """Return the result of a backend, which also writes the new keys and values to the cache."""
        return backend.attend(self.query, self.key, self.value, self.kv, self.state, params)

    def expected(self, params: AttentionParams) -> Tensor:
        """Compute attention in float64, one query and one head at a time. Shapes: [T, heads, head_dim]."""
        rows = []
        for index, history in enumerate(self.histories):
            first, last = self.state.query_starts[index : index + 2]
            context = self.state.context_lengths[index]
            for row in range(first, last):
                position = context - last + row
                rows.append(
                    torch.stack([self._head(row, head, position, history, params) for head in range(self.heads)])
                )
        return torch.stack(rows)

    def _head(self, row: int, head: int, position: int, history: Tensor, params: AttentionParams) -> Tensor:
        kv_head = head // (self.heads // history.shape[2])
        first = 0 if params.window is None else max(0, position + 1 - params.window)
        keys, values = history[:, first : position + 1, kv_head].double()
        scores = keys @ self.query[row, head].cpu().double() * params.scale
        if params.softcap is not None:
            scores = params.softcap * torch.tanh(scores / params.softcap)
        sink = torch.exp(params.sinks[head].cpu().double()) if params.sinks is not None else 0.0
        weights = torch.exp(scores) / (torch.exp(scores).sum() + sink)
        return weights @ values
