"""Products of 16-bit numbers by a persistent kernel whose operands are loaded by the tensor memory accelerator (TMA).

A product of 128 to 512 rows is between two limits: all weights have to be read, and tiles that fill the tensor cores
are too few to occupy all processors. The kernel has one program per processor, each of which computes several tiles one
after the other. It needs a Hopper GPU or newer. It was compared with torch in Triton's interpreter and compiled for
sm_90; it has not run on a device, and is used only for shapes for which it measured faster than torch's libraries.
"""

# Triton rewrites decorated functions, so a type checker cannot check their calls.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError
from triton.tools.tensor_descriptor import TensorDescriptor

from tiercel.values.errors import DeviceError

_ALIGNED = 8  # elements of 16 bits: rows of an operand of the TMA begin on 16 bytes
_DEPTH = 64  # inputs of a step: 128 bytes, the widest row without bank conflicts
_NARROW, _WIDE_ROWS = 64, 128  # rows of a tile


@dataclass(frozen=True, slots=True)
class DenseTile:
    """The outputs that one program computes at a time."""

    rows: int
    columns: int
    warps: int
    stages: int  # steps along the inputs whose operands are loaded ahead


def choose_dense_tile(rows: int, outputs: int, processors: int) -> DenseTile:
    """Return the widest tile of which there are enough for all processors. Chosen by computing, not by measuring."""
    tall = _NARROW if rows <= _NARROW else _WIDE_ROWS
    for columns in (256, 128, 64):
        if -(-rows // tall) * -(-outputs // columns) >= processors:
            return DenseTile(tall, columns, 8 if columns > 64 else 4, 3 if columns == 256 else 4)
    return DenseTile(tall, 32, 4, 6)


@triton.jit(do_not_specialize=["rows"])
def dense_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    outputs,
    inputs,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Multiply x [rows, inputs] by the transpose of weight [outputs, inputs]; all but the bias are tensor descriptors.

    Parts of a tile beyond the edge of a tensor are loaded as 0 and not stored. Tiles of the same weights follow each
    other, so that weights are read from memory once.
    """
    row_tiles = tl.cdiv(rows, ROWS)
    tiles = row_tiles * tl.cdiv(outputs, COLUMNS)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = tile % row_tiles * ROWS
        column = tile // row_tiles * COLUMNS
        acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for at in range(0, inputs, DEPTH):
            acc = tl.dot(x.load([row, at]), weight.load([column, at]).T, acc)
        if HAS_BIAS:
            columns = column + tl.arange(0, COLUMNS)
            acc += tl.load(bias + columns, mask=columns < outputs, other=0.0).to(tl.float32)[None, :]
        out.store([row, column], acc.to(out.dtype))


def multiply_dense(
    x: Tensor, weight: Tensor, bias: Tensor | None, processors: int, tile: DenseTile | None = None
) -> Tensor:
    """Return x @ weight.T + bias, with sums in float32 that are rounded once.

    Shapes: x [T, inputs], weight [outputs, inputs], both of one type of 16 bits, with sizes that are multiples of 8 and
            a contiguous weight; returns [T, outputs]. `processors`:
            of the device; the number of programs at most.
    Errors: DeviceError if the kernel cannot be compiled for this device.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0]
    out = x.new_empty(rows, outputs)
    if not rows:
        return out
    x = x if x.stride(1) == 1 and x.stride(0) % _ALIGNED == 0 and x.data_ptr() % 16 == 0 else x.clone()
    tile = tile or choose_dense_tile(rows, outputs, processors)
    tiles = -(-rows // tile.rows) * -(-outputs // tile.columns)
    try:
        dense_kernel[(min(processors, tiles),)](
            TensorDescriptor.from_tensor(x, [tile.rows, _DEPTH]),
            TensorDescriptor.from_tensor(weight, [tile.columns, _DEPTH]),
            x if bias is None else bias,
            TensorDescriptor.from_tensor(out, [tile.rows, tile.columns]),
            rows,
            outputs,
            inputs,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=_DEPTH,
            HAS_BIAS=bias is not None,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    except TritonError as exc:
        raise DeviceError("product.no_kernel", str(exc).strip().splitlines()[0], rows=rows, outputs=outputs) from exc
    return out
