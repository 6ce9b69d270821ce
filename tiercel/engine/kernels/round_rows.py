"""The rounding of a layer's input to 8 bits. The definition is `round_activations` in engine/models."""

# Triton rewrites decorated functions, so a type checker cannot check their calls.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiercel.engine.kernels.quantized_kv import FP8, magnitudes, round_to

_LEAST_TOKEN_SCALE = 1 / (448.0 * 512)  # of fp8 with a scale per token
_LEAST_GROUP_MAXIMUM = 1e-10  # of fp8 with several scales per token


@dataclass(frozen=True, slots=True)
class RowRounding:
    """A way to round rows. `scale`: the same for all; None: computed for each `group` of inputs, or each row."""

    format: int  # INT8 or FP8 of `engine.kernels.quantized_kv`
    scale: float | None = None
    group: int | None = None


@triton.jit
def round_rows_kernel(
    x, rounded, scales, size, fixed, least_peak, least_scale,
    HAS_FIXED: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip  # one program per piece of a row with a scale of its own
    piece = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    wide = tl.load(x + piece * size + at, mask=inside, other=0.0).to(tl.float32)
    peak = tl.max(magnitudes(wide), 0)  # bits, in which infinity and NaN are above all numbers
    limit = 448.0 if FORMAT == FP8 else 127.0
    lowest = -448.0 if FORMAT == FP8 else -128.0
    if HAS_FIXED:
        scale = fixed
        is_bad = peak > 0x7F800000
    else:
        is_bad = peak >= 0x7F800000
        largest = tl.where(is_bad, 0, peak).to(tl.float32, bitcast=True)
        scale = tl.maximum(tl.div_rn(tl.maximum(largest, least_peak), limit), least_scale)
        scale = tl.where(scale == 0, 1.0, scale)
    ratio = tl.div_rn(tl.where(is_bad, 0.0, wide), scale)
    ratio = tl.minimum(tl.maximum(ratio, lowest), limit)
    tl.store(rounded + piece * size + at, round_to(ratio, FORMAT), mask=inside)
    tl.store(scales + piece, tl.where(is_bad, float("nan"), scale))


def round_rows(x: Tensor, rounding: RowRounding) -> tuple[Tensor, Tensor]:
    """Return rows rounded to 8 bits, and their scales. A row with a NaN has a NaN as its scale, as has one with an
    infinity if its scale is computed.

    Shapes: x [T, inputs] contiguous; returns [T, inputs] int8, of fp8 the bits, and [T, groups] float32, with one group
            without `rounding.group`.
    Cost:   one kernel; every tensor is read or written once.
    """
    size = rounding.group or x.shape[1]
    rounded = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty(x.shape[0], x.shape[1] // size, dtype=torch.float32, device=x.device)
    is_fp8, block = rounding.format == FP8.value, triton.next_power_of_2(size)
    round_rows_kernel[(scales.numel(),)](
        x, rounded, scales, size, rounding.scale or 0.0,
        _LEAST_GROUP_MAXIMUM if is_fp8 and rounding.group is not None else 0.0,
        _LEAST_TOKEN_SCALE if is_fp8 and rounding.group is None else 0.0,
        HAS_FIXED=rounding.scale is not None, FORMAT=rounding.format, BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return rounded, scales
