"""Norm and rotate the projected queries and keys, and write keys and values into the cache."""

# Triton rewrites decorated functions, so a type checker cannot check their calls.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiercel.engine.forward.kv_cache import head_dim_of
from tiercel.engine.forward.state import ForwardState
from tiercel.engine.kernels.quantized_kv import WIDE, CacheArrays, find_scale, magnitudes, narrow

Norm = tuple[Tensor, float]
"""The weight [head_dim] of a root-mean-square norm and its epsilon."""


@triton.jit(do_not_specialize_on_alignment=("positions",))
def angles_kernel(positions, frequencies, cos, sin, half, scale, HALF: tl.constexpr):  # one program per token
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, HALF)
    inside = at < half
    angles = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + at, mask=inside, other=0.0)
    tl.store(cos + token * half + at, (tl.cos(angles) * scale).to(cos.dtype.element_ty), mask=inside)
    tl.store(sin + token * half + at, (tl.sin(angles) * scale).to(sin.dtype.element_ty), mask=inside)


@triton.jit
def _norm_heads(first, second, weight, at, half, eps):
    """Normalise some heads, given as their two halves, by the root mean square of both.

    Shapes: first, second [heads, HALF], zero outside of a head; weight [2 * half].
    """
    inside = at < half
    dtype = first.dtype
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    squares = tl.sum(wide_first * wide_first, axis=1) + tl.sum(wide_second * wide_second, axis=1)
    scale = tl.rsqrt(squares / (2 * half) + eps)[:, None]
    weight_first = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    weight_second = tl.load(weight + half + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    first = (weight_first * (wide_first * scale).to(dtype).to(tl.float32)).to(dtype)
    second = (weight_second * (wide_second * scale).to(dtype).to(tl.float32)).to(dtype)
    return first, second


@triton.jit
def _rotate(first, second, cos, sin):
    """Rotate both halves of some heads; each product is rounded before the sum. Shapes: [heads, HALF], [1, HALF]."""
    dtype = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    rotated_first = (first * cos).to(dtype).to(tl.float32) - (second * sin).to(dtype).to(tl.float32)
    rotated_second = (second * cos).to(dtype).to(tl.float32) + (first * sin).to(dtype).to(tl.float32)
    return rotated_first.to(dtype), rotated_second.to(dtype)


@triton.jit
def _store_halves(first, second, row, half, scale, mask, FORMAT: tl.constexpr):
    """Round a vector to 8 bits, given as its two halves, and store it and its scale. Shapes: [1, HALF]."""
    first, second = first.to(tl.float32), second.to(tl.float32)
    peak = tl.max(tl.maximum(magnitudes(first), magnitudes(second)), 1)[:, None]
    unit, bits = find_scale(peak, FORMAT)
    tl.store(row, narrow(first, unit, FORMAT), mask=mask)
    tl.store(row + half, narrow(second, unit, FORMAT), mask=mask)
    tl.store(scale + tl.zeros_like(peak), bits)


@triton.jit(do_not_specialize_on_alignment=("slot_ids", "slot_offsets"))
def store_heads_kernel(
    qkv,
    query_weight,
    key_weight,
    cos,
    sin,
    query,
    kv,
    scales,
    slot_ids,
    slot_offsets,
    group,
    half,
    query_eps,
    key_eps,
    slot_stride,
    row_stride,
    head_stride,
    scale_slot_stride,
    scale_row_stride,
    scale_head_stride,
    HAS_NORMS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    FORMAT: tl.constexpr,
):  # one program per token and key head, with the query heads that share it
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kv_heads = tl.num_programs(1)
    heads = group * kv_heads
    at = tl.arange(0, HALF)
    inside = at < half
    head_cos = tl.load(cos + token * half + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    head_sin = tl.load(sin + token * half + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    source = qkv + token * (heads + 2 * kv_heads) * 2 * half

    shared = tl.arange(0, GROUP)
    at_heads = (kv_head * group + shared)[:, None] * 2 * half + at[None, :]
    in_heads = (shared < group)[:, None] & inside[None, :]
    first = tl.load(source + at_heads, mask=in_heads, other=0.0)
    second = tl.load(source + at_heads + half, mask=in_heads, other=0.0)
    if HAS_NORMS:
        first, second = _norm_heads(first, second, query_weight, at, half, query_eps)
    first, second = _rotate(first, second, head_cos, head_sin)
    target = query + token * heads * 2 * half
    tl.store(target + at_heads, first, mask=in_heads)
    tl.store(target + at_heads + half, second, mask=in_heads)

    at_key = ((heads + kv_head) * 2 * half + at)[None, :]
    in_key = inside[None, :]
    first = tl.load(source + at_key, mask=in_key, other=0.0)
    second = tl.load(source + at_key + half, mask=in_key, other=0.0)
    if HAS_NORMS:
        first, second = _norm_heads(first, second, key_weight, at, half, key_eps)
    first, second = _rotate(first, second, head_cos, head_sin)
    slot, offset = tl.load(slot_ids + token).to(tl.int64), tl.load(slot_offsets + token).to(tl.int64)
    row = kv + slot * slot_stride + offset * row_stride + kv_head.to(tl.int64) * head_stride + at[None, :]
    at_value = at_key + kv_heads * 2 * half
    first_value = tl.load(source + at_value, mask=in_key, other=0.0)
    second_value = tl.load(source + at_value + half, mask=in_key, other=0.0)
    if FORMAT == WIDE:
        tl.store(row, first, mask=in_key)
        tl.store(row + half, second, mask=in_key)
        tl.store(row + 2 * half, first_value, mask=in_key)
        tl.store(row + 3 * half, second_value, mask=in_key)
    else:
        scale_row = scales + slot * scale_slot_stride + offset * scale_row_stride + kv_head * scale_head_stride
        _store_halves(first, second, row, half, scale_row, in_key, FORMAT)
        _store_halves(first_value, second_value, row + 2 * half, half, scale_row + 1, in_key, FORMAT)


def position_angles(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of positions, computed in float32.

    Shapes: positions [T] int64, frequencies [head_dim / 2] float32; returns two [T, head_dim / 2] of the dtype.
    """
    tokens, half = positions.shape[0], frequencies.shape[0]
    cos, sin = (torch.empty(tokens, half, dtype=dtype, device=positions.device) for _ in range(2))
    block = triton.next_power_of_2(half)
    angles_kernel[(tokens,)](positions, frequencies, cos, sin, half, scale, block, num_warps=1)
    return cos, sin


def store_heads(
    qkv: Tensor, norms: tuple[Norm, Norm] | None, angles: tuple[Tensor, Tensor], kv: Tensor, state: ForwardState
) -> Tensor:
    """Norm and rotate queries and keys, and write keys and values into the cache.

    Shapes:  qkv [T, (heads + 2 * kv_heads) * head_dim] contiguous, queries first; angles two [T, head_dim / 2];
             kv [slots, block_size, kv_heads, width], any stride of slots;
             returns the queries [T, heads, head_dim], contiguous.
    Cost:    one kernel; everything is read and written once.
    Effects: kv is written at the state's slots; offsets are computed in 64 bits.
    """
    kv_heads, head_dim, cache = kv.shape[2], head_dim_of(kv), CacheArrays.of(kv)
    tokens, heads = qkv.shape[0], qkv.shape[1] // head_dim - 2 * kv_heads
    group, half = heads // kv_heads, head_dim // 2
    (query_weight, query_eps), (key_weight, key_eps) = norms or ((qkv, 0.0), (qkv, 0.0))
    query = qkv.new_empty(tokens, heads, head_dim)
    group_block, half_block = triton.next_power_of_2(group), triton.next_power_of_2(half)
    store_heads_kernel[(tokens, kv_heads)](
        *(qkv, query_weight, key_weight, *angles, query, cache.rows, cache.scales, state.slot_ids, state.slot_offsets),
        *(group, half, query_eps, key_eps, *cache.rows.stride()[:3], *cache.scales.stride()[:3]),
        *(norms is not None, group_block, half_block, cache.format),
        num_warps=min(max(group_block * half_block // 256, 1), 8),
    )
    return query
