"""The layout of a layer's cache, and the rounding of keys and values that are stored in 8 bits.

A layer of a block in 16 or 32 bits is rows [block_size, kv_heads, 2 * head_dim], keys first. In 8 bits (int8, or fp8:
float8_e4m3fn) the rows are followed by the scales, so that rows stay aligned and a block is still one extent:

    rows   [block_size, kv_heads, 2 * head_dim]  8 bits each
    scales [block_size, kv_heads, 2]             bfloat16: of the key, of the value

The shape of the tensor counts the bytes of the scales in its last axis, so that all types have the same axes, but in 8
bits a row of that shape is no token: use `split_cache`.

A key or a value x [head_dim], in the type of the activations, is rounded so, in float32 with round to nearest even:

    scale = bfloat16(max |x| / limit), limit 127 for int8 and 448 for fp8; 0 where it is below 2 ** -126
    q     = round(x / scale), at most the limit in magnitude; 0 where the scale is 0
    x'    = q * scale

The scale is a bfloat16 because float16 would be subnormal for heads with a maximum below 0.008, and too large above
8 million. What its rounding takes from the range is less than half a step: x / scale is at most 127.5 or 449.8. If any
number of x is not finite, the scale is NaN and q is 0, so that all of x' is NaN: a bad row stays a bad row. The native
and the Triton kernels store the same bytes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tiercel.values.tier import SCALES_BYTES

LIMIT_BY_DTYPE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest magnitude of a stored number, by the types of 8 bits."""

_SMALLEST_SCALE = 2.0**-126  # the smallest normal number: processors may treat smaller ones as 0


class SplitCache(NamedTuple):
    """The parts of an 8-bit cache: two views of its memory.

    Shapes: rows [slots, block_size, kv_heads, 2 * head_dim] of the cache's type;
            scales [slots, block_size, kv_heads, 2] bfloat16.
    """

    rows: Tensor
    scales: Tensor


def is_quantized(kv: Tensor) -> bool:
    """Return whether a cache has 8 bits and scales."""
    return kv.dtype in LIMIT_BY_DTYPE


def width_of(head_dim: int, dtype: torch.dtype) -> int:
    """Return the last axis of a cache of this type."""
    return 2 * head_dim + (SCALES_BYTES if dtype in LIMIT_BY_DTYPE else 0)


def head_dim_of(kv: Tensor) -> int:
    """Return the numbers of a key. Shapes: kv [..., width]."""
    return (kv.shape[-1] - (SCALES_BYTES if is_quantized(kv) else 0)) // 2


def split_cache(kv: Tensor) -> SplitCache:
    """Return the rows and the scales of one layer of an 8-bit cache.

    Shapes: kv [slots, block_size, kv_heads, 2 * head_dim + 4], any stride of slots; what belongs to a slot adjoins.
    """
    slots, block_size, kv_heads, width = kv.shape
    size = width - SCALES_BYTES
    stride, offset = kv.stride(0), kv.storage_offset()
    rows = kv.as_strided((slots, block_size, kv_heads, size), (stride, kv_heads * size, size, 1), offset)
    scales = kv.view(torch.bfloat16).as_strided(
        (slots, block_size, kv_heads, 2),
        (stride // 2, kv_heads * 2, 2, 1),
        (offset + block_size * kv_heads * size) // 2,
    )
    return SplitCache(rows, scales)


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round vectors to 8 bits, as the module says. Shapes: x [..., size]; returns [..., size] and [...] bfloat16."""
    limit = LIMIT_BY_DTYPE[dtype]
    wide = x.float()
    scale = (wide.abs().amax(-1) / limit).to(torch.bfloat16)
    scale = torch.where(scale < _SMALLEST_SCALE, 0.0, scale)
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    unit = scale.float().unsqueeze(-1)
    ratio = torch.where(unit > 0, wide / unit, 0.0).clamp(-limit, limit)
    return (ratio.round() if dtype is torch.int8 else ratio).to(dtype), scale


def dequantize(q: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return vectors of 8 bits in another type. Shapes: q [..., size], scales [...]; returns [..., size]."""
    return (q.float() * scales.float().unsqueeze(-1)).to(dtype)
