"""The inputs of every layer of a forward: the places of its tokens in the cache, and the parameters of attention."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """The parameters of a layer's attention; the same in every step."""

    scale: float
    window: int | None = None  # sliding window: a query sees itself and the window - 1 tokens before it
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    sinks: Tensor | None = None  # [heads]: an additional logit per head in the softmax's denominator (gpt-oss)


@dataclass(frozen=True, slots=True)
class ForwardState:
    """The places of the tokens of one forward. There is one state per nano-batch, read by every layer.

    The slices of S sequences are concatenated to T tokens. Sequence s owns the tokens
    [query_starts[s], query_starts[s + 1]) and sees its own keys [0, context_lengths[s]), the last of which belongs to
    its own last query.

    Shapes: query_starts [S + 1] (host), context_lengths [S] (host), block_tables [S, blocks] int64 on the device
            (unused tails are 0, the null block), positions [T] int64, slot_ids [T] int64, slot_offsets [T] int64
            (token t is written to kv[slot_ids[t], layer, slot_offsets[t]]); device_query_starts [S + 1] and
            device_context_lengths [S] int32, copies of the first two for kernels. While a graph is recorded, the host
            side bounds the slices of every step that it will serve; kernels read the device's.
    """

    query_starts: tuple[int, ...]
    context_lengths: tuple[int, ...]
    block_tables: Tensor
    positions: Tensor
    slot_ids: Tensor
    slot_offsets: Tensor
    device_query_starts: Tensor
    device_context_lengths: Tensor

    @classmethod
    def of_slices(
        cls,
        tables: Tensor,
        starts: Sequence[int],
        ends: Sequence[int],
        block_size: int,
        *,
        writes_null_block: bool = False,
    ) -> "ForwardState":
        """Return the state of slices [start, end) of sequences whose blocks are the rows of `tables`.

        For measuring, probing and testing; the arrays of a step come from `engine.step.inputs`. `writes_null_block`:
        the blocks of the tables are only read, and the null block is written.
        """
        device = tables.device
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        query_starts = tuple(accumulate(lengths, initial=0))
        positions = torch.cat([torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]).to(device)
        rows = torch.repeat_interleave(torch.tensor(lengths)).to(device)
        slot_ids = torch.zeros_like(positions) if writes_null_block else tables[rows, positions // block_size]
        return cls(
            query_starts=query_starts,
            context_lengths=tuple(ends),
            block_tables=tables,
            positions=positions,
            slot_ids=slot_ids,
            slot_offsets=positions % block_size,
            device_query_starts=torch.tensor(query_starts, dtype=torch.int32, device=device),
            device_context_lengths=torch.tensor(list(ends), dtype=torch.int32, device=device),
        )

    @property
    def num_sequences(self) -> int:
        return len(self.context_lengths)

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has exactly one query token."""
        return self.query_starts[-1] == len(self.context_lengths)
