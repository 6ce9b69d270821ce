"""Write the keys and values of a step into the cache."""

# Triton rewrites decorated functions, so a type checker cannot check their calls.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl
from torch import Tensor

from tiercel.engine.forward.state import ForwardState
from tiercel.engine.kernels.quantized_kv import WIDE, CacheArrays, store_vectors


@triton.jit(do_not_specialize_on_alignment=("slot_ids", "slot_offsets"))
def store_kernel(
    key,
    value,
    kv,
    scales,
    slot_ids,
    slot_offsets,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    slot_stride,
    row_stride,
    head_stride,
    scale_slot_stride,
    scale_row_stride,
    scale_head_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Write all heads of one token. HEADS and DIMS are KV_HEADS and HEAD_DIM rounded up to powers of two."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS)[:, None]
    dims = tl.arange(0, DIMS)[None, :]
    mask = (heads < KV_HEADS) & (dims < HEAD_DIM)
    slot = tl.load(slot_ids + token).to(tl.int64)
    offset = tl.load(slot_offsets + token)
    row = kv + slot * slot_stride + offset * row_stride + heads * head_stride + dims
    keys = tl.load(key + token * key_token_stride + heads * key_head_stride + dims, mask=mask, other=0.0)
    values = tl.load(value + token * value_token_stride + heads * value_head_stride + dims, mask=mask, other=0.0)
    if FORMAT == WIDE:
        tl.store(row, keys, mask=mask)
        tl.store(row + HEAD_DIM, values, mask=mask)
    else:
        scale_row = scales + slot * scale_slot_stride + offset * scale_row_stride + heads * scale_head_stride
        store_vectors(keys.to(tl.float32), row, scale_row, mask, heads < KV_HEADS, FORMAT)
        store_vectors(values.to(tl.float32), row + HEAD_DIM, scale_row + 1, mask, heads < KV_HEADS, FORMAT)


def store_rows(key: Tensor, value: Tensor, kv: Tensor, state: ForwardState) -> None:
    """Write the keys and values of this forward into their slots.

    Shapes:  key, value [T, kv_heads, head_dim], any strides but the last; kv [slots, block_size, kv_heads, width], any
             stride of slots.
    Cost:    one kernel; the rows are read and written once.
    Effects: kv is written; several tokens of padded rows may write the null block, whose content is not used.
    """
    tokens, kv_heads, head_dim = key.shape
    cache = CacheArrays.of(kv)
    store_kernel[(tokens,)](
        key,
        value,
        cache.rows,
        cache.scales,
        state.slot_ids,
        state.slot_offsets,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        *cache.rows.stride()[:3],
        *cache.scales.stride()[:3],
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HEADS=triton.next_power_of_2(kv_heads),
        DIMS=triton.next_power_of_2(head_dim),
        FORMAT=cache.format,
    )
