"""Read and write rows of the cache by block and offset, in plain torch."""

import torch
from torch import Tensor

from tiercel.engine.forward.kv_cache import dequantize, head_dim_of, is_quantized, quantize, split_cache
from tiercel.engine.forward.state import ForwardState


def write_rows(key: Tensor, value: Tensor, kv: Tensor, state: ForwardState) -> None:
    """Write the keys and values of this forward into their slots, in the type of the cache.

    Shapes:  key, value [T, kv_heads, head_dim]; kv [slots, block_size, kv_heads, width], any stride of slots.
    Effects: kv is written; torch computes offsets in 64 bits.
    """
    at = state.slot_ids, state.slot_offsets
    if not is_quantized(kv):
        kv[at] = torch.cat((key, value), dim=-1).to(kv.dtype)
        return
    rows, scales = split_cache(kv)
    (keys, key_scales), (values, value_scales) = quantize(key, kv.dtype), quantize(value, kv.dtype)
    # As bytes, because torch has few operators for fp8.
    rows.view(torch.uint8)[at] = torch.cat((keys.view(torch.uint8), values.view(torch.uint8)), dim=-1)
    scales[at] = torch.stack((key_scales, value_scales), dim=-1)


def gather_rows(kv: Tensor, table: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Copy the first `length` rows of one sequence out of its blocks: keys and values, in another type.

    Shapes: kv [slots, block_size, kv_heads, width]; table [blocks] int64; returns two [length, kv_heads, head_dim].
    """
    blocks = -(-length // kv.shape[1])
    keys, values = read_blocks(copy_blocks(kv, table[:blocks]), dtype)
    return keys[:length], values[:length]


def copy_blocks(kv: Tensor, slots: Tensor) -> Tensor:
    """Return copies of blocks. Shapes: slots [n] int64; returns [n, block_size, kv_heads, width]."""
    return kv.view(torch.uint8).view(len(kv), -1).index_select(0, slots).view(kv.dtype).view(-1, *kv.shape[1:])


def read_blocks(kv: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the keys and values of all tokens of some blocks, in another type.

    Shapes: kv [n, block_size, kv_heads, width]; returns two [n * block_size, kv_heads, head_dim].
    """
    head_dim = head_dim_of(kv)
    if is_quantized(kv):
        rows, scales = split_cache(kv)
        keys, values = (
            dequantize(rows[..., half * head_dim :][..., :head_dim], scales[..., half], dtype).flatten(0, 1)
            for half in range(2)
        )
        return keys, values
    rows = kv.flatten(0, 1).to(dtype)
    return rows[..., :head_dim], rows[..., head_dim:]
