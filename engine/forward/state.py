"""What every layer of a forward is given: where its tokens lie in the cache, and what it asks of attention."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What a layer asks of attention; the same at every step."""

    scale: float
    window: int | None = None  # sliding window: a query sees itself and the window - 1 tokens before it
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    sinks: Tensor | None = None  # [heads]: one more logit per head in the softmax's denominator (gpt-oss)


@dataclass(frozen=True, slots=True)
class ForwardState:
    """Where the tokens of one forward lie. One per nano-batch, read by every layer.

    S sequences with ragged slices lie behind each other in one row of T tokens; sequence s owns tokens
    [query_starts[s], query_starts[s + 1]) of it and sees keys [0, context_lengths[s]) of its own, the last of
    which is its own last query.

    Shapes: query_starts [S + 1] (host), context_lengths [S] (host), block_tables [S, blocks] int64 on the device
            (unused tails are 0, the null block), positions [T] int64, slot_ids [T] int64, slot_offsets [T] int64
            (token t is written to kv[slot_ids[t], layer, slot_offsets[t]]); device_query_starts [S + 1] and
            device_context_lengths [S] int32, the first two once more, for kernels.
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
        """Slices [start, end) of sequences whose blocks are the rows of `tables`, on the device of `tables`.

        For measuring, probing and testing: a step's own arrays come from `engine.inputs`. `writes_null_block`: what the
        tables hold is read, and nothing but the null block is written.
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
        """Every sequence has exactly one query token."""
        return self.query_starts[-1] == len(self.context_lengths)
