"""Products with weights of 4 and 8 bits: values are exact in the kernel, and scales are applied to sums.

Weights are integers of 4 or 8 bits or float8 (e4m3); activations are as they are, or rounded to int8 or float8. Sums of
integers are exact; all others are float32. Few rows are cut along the inputs, and the parts are added in their order by
a second kernel, so that a result does not depend on which program ends first. The kernels were compared with torch in
Triton's interpreter and compiled for GPUs; they have not run on a device.
"""

# Triton rewrites decorated functions, so a type checker cannot check their calls.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiercel.engine.kernels.product_tiles import ProductTile, choose_product_tile, choose_splits
from tiercel.engine.kernels.quantized_kv import FP8, INT8, WIDE, widen

_MAX_DEPTH = 128  # inputs of a step; of 4 bits, both halves of the bytes together
LEAST_DEPTH = 16  # of a product of tensor cores with 16 bits; with 8 bits 32
_MERGED = 1024  # outputs of a program that adds parts


def depth_of(inputs: int, *groups: int | None) -> int:
    """Return the inputs of a step: a power of two, up to 128, that divides every number of inputs with one scale."""
    sizes = [size for size in groups if size is not None and size != inputs]
    depth = _MAX_DEPTH
    while any(size % depth for size in sizes):
        depth //= 2
    return depth


def pack_nibbles(values: Tensor, depth: int) -> Tensor:
    """Return integers of 4 bits in the order in which the kernel reads them.

    The inputs are cut into steps of twice `depth`. A byte has one of the first half of a step in its low bits, and in
    its high bits the input `depth` behind it, so that a tile is two operands without any exchange between threads. The
    bytes of a step are next to each other for all outputs, so that a tile is one piece of memory.

    Shapes: values [outputs, inputs] int8 from 0 to 15; returns [steps, outputs, depth] uint8, filled with zeros.
    """
    outputs, inputs = values.shape
    steps = -(-inputs // (2 * depth))
    halves = torch.nn.functional.pad(values.view(torch.uint8), (0, steps * 2 * depth - inputs))
    halves = halves.view(outputs, steps, 2, depth)
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).transpose(0, 1).contiguous()


def unpack_nibbles(packed: Tensor, inputs: int) -> Tensor:
    """Return what `pack_nibbles` has packed. Shapes: [steps, outputs, depth] uint8 -> [outputs, inputs] int8."""
    rows = packed.transpose(0, 1)
    return torch.stack((rows & 15, rows >> 4), dim=2).flatten(1)[:, :inputs].contiguous().view(torch.int8)


@dataclass(frozen=True, slots=True)
class ProductWeight:
    """A weight as the kernel reads it: scales[g, o] * (values[o, i] - zero) + offsets[g, o].

    values:  [outputs, inputs] int8, of float8 the bits; or of 4 bits as `pack_nibbles` returns them
    scales:  [groups, outputs] float32, float16 or bfloat16
    offsets: as scales; None: all are 0
    group:   inputs with one scale, which `depth` divides; the number of inputs: one scale per output
    depth:   inputs of a step, of 4 bits of half a step; see `depth_of`
    zero:    0 or 8, of 4 bits
    """

    values: Tensor
    scales: Tensor
    offsets: Tensor | None
    inputs: int
    outputs: int
    group: int
    depth: int
    bits: int
    is_float8: bool = False
    zero: int = 0

    @property
    def steps(self) -> int:
        """The steps along the inputs."""
        return -(-self.inputs // (self.depth * (8 // self.bits)))


@dataclass(frozen=True, slots=True)
class RowOperand:
    """The other operand of a product.

    numbers: [T, inputs] contiguous: floating-point numbers, or int8 that are integers or the bits of float8
    format:  WIDE, INT8 or FP8 of `engine.kernels.quantized_kv`
    scales:  [T, groups] float32 of numbers of 8 bits
    group:   inputs with one scale, which the depth of the weight divides; None: all of them
    """

    numbers: Tensor
    format: int = WIDE.value
    scales: Tensor | None = None
    group: int | None = None


@triton.jit
def widen_weights(packed, PART: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, IS_FLOAT8: tl.constexpr,
                  dtype: tl.constexpr):  # fmt: skip
    """Return values of a tile in the type of the other operand, exactly; float8 divided by 256."""
    if BITS == 4:
        nibbles = ((packed >> (4 * PART)) & 15).to(tl.int32)
        if dtype == tl.int8:
            weights = (nibbles - ZERO).to(tl.int8)
        else:
            # The bits of a bfloat16 of 128 to 143, widened: cheaper than a conversion of integers.
            weights = (((nibbles | 0x4300) << 16).to(tl.float32, bitcast=True) - (128.0 + ZERO)).to(dtype)
    elif dtype == tl.int8:
        weights = packed
    else:
        weights = widen(packed, dtype, FP8 if IS_FLOAT8 else INT8)
    return weights


@triton.jit(do_not_specialize=["rows"])
def quantized_product_kernel(
    x, x_scales, values, scales, offsets, bias, out, rows, inputs, outputs, steps,
    GROUP: tl.constexpr, X_GROUP: tl.constexpr, X_FORMAT: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr,
    IS_FLOAT8: tl.constexpr, HAS_OFFSETS: tl.constexpr, HAS_BIAS: tl.constexpr, IS_NATIVE: tl.constexpr,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip  # one program per tile of rows, tile of outputs and part of the inputs
    # GROUP, X_GROUP: 0 where there is one scale, which is applied to the sum over all inputs. IS_NATIVE: the tensor
    # cores multiply float8.
    PARTS: tl.constexpr = 8 // BITS
    UNIT: tl.constexpr = DEPTH * PARTS
    FOLDS: tl.constexpr = GROUP + X_GROUP > 0
    FOLDS_ONCE: tl.constexpr = GROUP % UNIT + X_GROUP % UNIT == 0  # a step has one scale
    IS_INTEGER: tl.constexpr = X_FORMAT == INT8
    KEEPS_SUMS: tl.constexpr = IS_INTEGER and not FOLDS and not HAS_OFFSETS
    kind: tl.constexpr = tl.int32 if IS_INTEGER else tl.float32
    operand: tl.constexpr = tl.int8 if IS_INTEGER else (tl.float16 if X_FORMAT == FP8 else x.dtype.element_ty)
    # What widened float8 lacks; see `widen`.
    X_UNIT: tl.constexpr = 256.0 if X_FORMAT == FP8 and not IS_NATIVE else 1.0
    FACTOR: tl.constexpr = X_UNIT * 256.0 if IS_FLOAT8 and not IS_NATIVE else X_UNIT

    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(2)
    is_row, is_column = row < rows, column < outputs
    left = x + row.to(tl.int64)[:, None] * inputs
    depth = tl.arange(0, DEPTH)
    per_part = tl.cdiv(steps, SPLITS)
    first = part * per_part
    last = tl.minimum(first + per_part, steps)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32 if FOLDS else kind)
    x_total = tl.zeros((ROWS,), dtype=tl.float32)
    for step in range(first, last):
        if BITS == 4:
            right = values + (step * outputs + column.to(tl.int64))[None, :] * DEPTH + depth[:, None]
            packed = tl.load(right, mask=is_column[None, :], other=0)
        else:
            at = step * DEPTH + depth
            right = values + column.to(tl.int64)[None, :] * inputs + at[:, None]
            packed = tl.load(right, mask=is_column[None, :] & (at < inputs)[:, None], other=0)
        sums = tl.zeros((ROWS, COLUMNS), dtype=kind)
        x_sums = tl.zeros((ROWS,), dtype=tl.float32)
        for half in tl.static_range(PARTS):
            start = step * UNIT + half * DEPTH
            at = start + depth
            numbers = tl.load(left + at[None, :], mask=is_row[:, None] & (at < inputs)[None, :], other=0)
            if IS_NATIVE:
                weights = packed.to(tl.float8e4nv, bitcast=True)
                numbers = numbers.to(tl.float8e4nv, bitcast=True)
            else:
                weights = widen_weights(packed, half, BITS, ZERO, IS_FLOAT8, operand)
                if X_FORMAT == FP8:
                    numbers = widen(numbers, tl.float16, FP8)
            if HAS_OFFSETS:
                x_sums += tl.sum(numbers.to(tl.float32), 1)
            if FOLDS:
                sums = tl.dot(numbers, weights, sums, input_precision=PRECISION, out_dtype=kind)
                if half == PARTS - 1 or not FOLDS_ONCE:
                    is_read = is_column & (start < inputs)
                    group = start // GROUP if GROUP > 0 else 0
                    scale = tl.load(scales + group * outputs + column, mask=is_read, other=0.0).to(tl.float32)
                    scale = scale[None, :] * FACTOR
                    if X_GROUP > 0:
                        x_group = start // X_GROUP
                        x_scale = tl.load(
                            x_scales + row * (inputs // X_GROUP) + x_group, mask=is_row & (start < inputs), other=0.0
                        )
                        scale = scale * x_scale[:, None]
                    total = tl.fma(sums.to(tl.float32), scale + tl.zeros((ROWS, COLUMNS), tl.float32), total)
                    if HAS_OFFSETS:
                        offset = tl.load(offsets + group * outputs + column, mask=is_read, other=0.0).to(tl.float32)
                        total += (x_sums * X_UNIT)[:, None] * offset[None, :]
                    sums = tl.zeros((ROWS, COLUMNS), dtype=kind)
                    x_sums = tl.zeros((ROWS,), dtype=tl.float32)
            elif IS_NATIVE:
                # Tensor cores add products of float8 with fewer bits than float32 has.
                total += tl.dot(numbers, weights, input_precision=PRECISION, out_dtype=kind)
            else:
                total = tl.dot(numbers, weights, total, input_precision=PRECISION, out_dtype=kind)
        x_total += x_sums

    is_inside = is_row[:, None] & is_column[None, :]
    place = row.to(tl.int64)[:, None] * outputs + column[None, :]
    if SPLITS > 1 and KEEPS_SUMS:
        tl.store(out + part.to(tl.int64) * rows * outputs + place, total, mask=is_inside)
    else:
        result = total.to(tl.float32)
        if not FOLDS:
            result = result * (tl.load(scales + column, mask=is_column, other=0.0).to(tl.float32) * FACTOR)[None, :]
            if HAS_OFFSETS:
                offset = tl.load(offsets + column, mask=is_column, other=0.0).to(tl.float32)
                result += (x_total * X_UNIT)[:, None] * offset[None, :]
        if SPLITS > 1:
            tl.store(out + part.to(tl.int64) * rows * outputs + place, result, mask=is_inside)
        else:
            if X_FORMAT != WIDE and X_GROUP == 0:
                result = result * tl.load(x_scales + row, mask=is_row, other=0.0)[:, None]
            if HAS_BIAS:
                result += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
            tl.store(out + place, result.to(out.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=["rows"])
def merge_parts_kernel(
    parts, x_scales, scales, bias, out, rows, outputs,
    HAS_X_SCALES: tl.constexpr, IS_INTEGER: tl.constexpr, HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip  # one program per row and block of outputs
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < outputs
    total = tl.load(parts + row * outputs + column, mask=is_column, other=0)
    for part in range(1, SPLITS):
        total += tl.load(parts + (part * rows + row) * outputs + column, mask=is_column, other=0)
    result = total.to(tl.float32)
    if IS_INTEGER:
        result = result * tl.load(scales + column, mask=is_column, other=0.0).to(tl.float32)
    if HAS_X_SCALES:
        result = result * tl.load(x_scales + row)
    if HAS_BIAS:
        result += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + column, result.to(out.dtype.element_ty), mask=is_column)


def multiply(
    x: RowOperand,
    weight: ProductWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
    processors: int,
    *,
    has_float8: bool = False,
    tile: ProductTile | None = None,
) -> Tensor:
    """Return x times the transposed weight, with the bias, rounded to `dtype` once.

    Shapes: bias [outputs]; returns [T, outputs].
    Cost:   one kernel, or two for few rows; all launches depend on the shapes alone. With several parts they are in
            memory in 32 bits.

    `processors`: streaming multiprocessors; `has_float8`: tensor cores multiply float8 (from sm_89 on).
    """
    numbers, outputs, inputs = x.numbers, weight.outputs, weight.inputs
    rows = numbers.shape[0]
    tile = tile or choose_product_tile(rows, numbers.element_size())
    splits = choose_splits(rows, tile, outputs, weight.steps, processors)
    group = 0 if weight.group == inputs else weight.group
    x_group = 0 if x.group is None or x.group == inputs else x.group
    is_exact = x.format == INT8.value and group + x_group == 0 and weight.offsets is None
    out = torch.empty(rows, outputs, dtype=dtype, device=numbers.device)
    if rows == 0:
        return out
    target = out
    if splits > 1:
        kind = torch.int32 if is_exact else torch.float32
        target = torch.empty(splits, rows, outputs, dtype=kind, device=numbers.device)
    x_scales = numbers if x.scales is None else x.scales
    offsets, added = weight.scales if weight.offsets is None else weight.offsets, out if bias is None else bias
    quantized_product_kernel[(triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.columns), splits)](
        numbers, x_scales, weight.values, weight.scales, offsets, added, target, rows, inputs, outputs, weight.steps,
        GROUP=group, X_GROUP=x_group, X_FORMAT=x.format, BITS=weight.bits, ZERO=weight.zero,
        IS_FLOAT8=weight.is_float8, HAS_OFFSETS=weight.offsets is not None, HAS_BIAS=bias is not None,
        IS_NATIVE=has_float8 and weight.is_float8 and x.format == FP8.value,
        SPLITS=splits, ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=weight.depth,
        PRECISION="ieee" if numbers.element_size() == 4 else "tf32",
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
    if splits > 1:
        merge_parts_kernel[(rows, triton.cdiv(outputs, _MERGED))](
            target, x_scales, weight.scales, added, out, rows, outputs,
            HAS_X_SCALES=x.format != WIDE.value and x_group == 0, IS_INTEGER=is_exact, HAS_BIAS=bias is not None,
            SPLITS=splits, BLOCK=_MERGED, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
