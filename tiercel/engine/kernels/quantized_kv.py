"""Keys and values of 8 bits in kernels: the layout and the rounding of `engine.forward.kv_cache`.

fp8 is handled as integers, because processors before Hopper have no instructions for it.
"""

# Triton rewrites decorated functions, so a type checker cannot check their calls.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiercel.engine.forward.kv_cache import is_quantized, split_cache

WIDE, INT8, FP8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""How a kernel reads the cache, its FORMAT: numbers as they are, or one of the types of 8 bits."""

_ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2 ** 23: adding it leaves the nearest integer in the low bits


@dataclass(frozen=True, slots=True)
class CacheArrays:
    """A layer's cache as kernels see it. Strides count elements.

    Shapes: rows [slots, block_size, kv_heads, 2 * head_dim], in 8 bits as int8; scales [slots, block_size, kv_heads,
            2], the bits of bfloat16 as int16; without 8 bits they are the rows, which no kernel reads as scales.
    """

    rows: Tensor
    scales: Tensor
    format: int

    @classmethod
    def of(cls, kv: Tensor) -> "CacheArrays":
        """Shapes: kv [slots, block_size, kv_heads, width], any stride of slots."""
        if not is_quantized(kv):
            return cls(kv, kv, WIDE.value)
        rows, scales = split_cache(kv)
        return cls(rows.view(torch.int8), scales.view(torch.int16), (INT8 if kv.dtype is torch.int8 else FP8).value)


@triton.jit
def widen(numbers, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """Return numbers of the cache in another type; those of 8 bits without their scales, and fp8 divided by 256."""
    if FORMAT == FP8:
        bits = numbers.to(tl.int16)
        # The bits of fp8 are those of a float16 that is 256 times smaller, also where it is subnormal.
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return half.to(tl.float16, bitcast=True).to(dtype)
    if FORMAT == INT8:
        return numbers.to(tl.float32).to(dtype)  # not at once, which the interpreter does not round for bfloat16
    return numbers.to(dtype)


@triton.jit
def read_scales(scales, mask, FORMAT: tl.constexpr):
    """Return scales by which what `widen` returns is to be multiplied, as float32; 0 where masked out."""
    found = (tl.load(scales, mask=mask, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    if FORMAT == FP8:
        found = found * 256.0
    return found


@triton.jit
def find_scale(peak, FORMAT: tl.constexpr):
    """Return what a vector is divided by, or 0 if its numbers are stored as 0, and the bits of its scale.

    `peak`: the bits of the largest magnitude, in which infinity and NaN are above all numbers.
    """
    bits = tl.div_rn(peak.to(tl.float32, bitcast=True), 448.0 if FORMAT == FP8 else 127.0).to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_bad = peak >= 0x7F800000
    bits = tl.where(is_bad, 0x7FC0, tl.where(bits < 0x80, 0, bits))
    return tl.where(is_bad, 0, bits << 16).to(tl.float32, bitcast=True), bits.to(tl.int16)


@triton.jit
def magnitudes(x):
    """Return the bits of magnitudes; they have the order of the magnitudes."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def narrow(x, unit, FORMAT: tl.constexpr):
    """Return x / unit rounded to 8 bits, as int8; 0 where the unit is 0. Shapes: x float32; unit broadcasts to it."""
    limit = 448.0 if FORMAT == FP8 else 127.0
    ratio = tl.div_rn(tl.where(unit > 0, x, 0.0), tl.where(unit > 0, unit, 1.0))
    return round_to(tl.minimum(tl.maximum(ratio, -limit), limit), FORMAT)


@triton.jit
def round_to(ratio, FORMAT: tl.constexpr):
    """Return numbers rounded to 8 bits, halves to the even ones, as int8. Shapes: float32 that the type can hold."""
    if FORMAT == INT8:
        return (ratio + _ROUNDING).to(tl.int32, bitcast=True).to(tl.int8)
    bits = ratio.to(tl.int32, bitcast=True)
    rest = bits & 0x7FFFFFFF
    normal = (rest - 0x3C000000 + 0x7FFFF + ((rest >> 20) & 1)) >> 20
    # Below 2 ** -6 fp8 is subnormal, in units of 2 ** -9.
    small = (rest.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return (tl.where(rest < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def store_vectors(x, rows, scales, mask, is_vector, FORMAT: tl.constexpr):
    """Round vectors to 8 bits and store them with their scales.

    Shapes: x [N, D] float32, 0 where masked out; rows and mask [N, D]; scales and is_vector [N, 1].
    """
    unit, bits = find_scale(tl.max(magnitudes(x), 1)[:, None], FORMAT)
    tl.store(rows, narrow(x, unit, FORMAT), mask=mask)
    tl.store(scales, bits, mask=is_vector)
