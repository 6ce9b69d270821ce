"""Read and write rows of the cache by block and offset, in plain torch."""

import torch
from torch import Tensor

from tiercel.engine.forward.state import ForwardState


def write_rows(key: Tensor, value: Tensor, kv: Tensor, state: ForwardState) -> None:
    """Write the keys and values of this forward into their slots, in the type of the cache.

    Shapes:  key, value [T, kv_heads, head_dim]; kv [slots, block_size, kv_heads, 2 * head_dim], any stride of slots.
    Effects: kv is written; torch computes offsets in 64 bits.
    """
    kv[state.slot_ids, state.slot_offsets] = torch.cat((key, value), dim=-1).to(kv.dtype)


def gather_rows(kv: Tensor, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Copy the first `length` rows of one sequence out of its blocks: keys and values.

    Shapes: kv [slots, block_size, kv_heads, 2 * head_dim]; table [blocks] int64; returns two views
            [length, kv_heads, head_dim] of one copy.
    """
    _, block_size, kv_heads, width = kv.shape
    blocks = -(-length // block_size)
    rows = kv.view(kv.shape[0], -1).index_select(0, table[:blocks]).view(-1, kv_heads, width)[:length]
    return rows[..., : width // 2], rows[..., width // 2 :]
