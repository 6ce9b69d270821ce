"""The products of a mixture of experts: every chosen expert in one launch, whatever the tokens chose.

The pairs of tokens and experts are sorted by expert, and each expert's pairs are divided into blocks of rows, the last
of which is padded. The number of blocks is the largest that can be needed, so that all shapes depend on the number of
tokens alone and a CUDA graph can hold a decode. Weights are found through a table of addresses: each expert keeps its
own. The kernel was compared with torch in Triton's interpreter and compiled for Hopper; it has not run on a device.
"""

# Triton rewrites decorated functions, so a type checker cannot check their calls.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiercel.engine.kernels.activation import silu_mul

_FEW_ROWS, _MANY_ROWS = 16, 64  # of a block: the least of a tensor core, and enough to reuse a tile of weights
_COLUMNS = 64  # outputs of a program
_DEPTH_BYTES = 128  # of a row of x or of a weight that are loaded at once


@triton.jit(do_not_specialize=["per_row"])
def expert_product_kernel(
    x, addresses, order, block_experts, block_starts, block_ends, out, per_row, inputs, outputs,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip  # one program per block of pairs and tile of outputs
    block = tl.program_id(0)
    start, end = tl.load(block_starts + block), tl.load(block_ends + block)
    if start >= end:
        return
    rows = start + tl.arange(0, ROWS)
    inside = rows < end
    pairs = tl.load(order + rows, mask=inside, other=0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    weight = tl.load(addresses + tl.load(block_experts + block)).to(tl.pointer_type(x.dtype.element_ty))
    left = x + (pairs // per_row)[:, None] * inputs
    right = weight + columns.to(tl.int64)[None, :] * inputs
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, inputs, DEPTH):
        at = first + tl.arange(0, DEPTH)
        values = tl.load(left + at[None, :], mask=inside[:, None] & (at < inputs)[None, :], other=0.0)
        weights = tl.load(right + at[:, None], mask=(at < inputs)[:, None] & (columns < outputs)[None, :], other=0.0)
        total = tl.dot(values, weights, total, input_precision=PRECISION)
    tl.store(
        out + pairs[:, None] * outputs + columns[None, :],
        total.to(out.dtype.element_ty),
        mask=inside[:, None] & (columns < outputs)[None, :],
    )


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """Pairs of tokens and experts in blocks of `rows` that have one expert each.

    order:   [pairs] int64, sorted by expert; pair p is choice p % per_token of token p // per_token
    experts: [blocks] int64
    starts, ends: [blocks] int64, positions in `order`; a block whose end is not behind its start is not used
    """

    order: Tensor
    experts: Tensor
    starts: Tensor
    ends: Tensor
    rows: int

    @classmethod
    def of(cls, chosen: Tensor, experts: int) -> "ExpertBlocks":
        """Divide the pairs of `chosen`, [T, per_token] int64. Waits for nothing; all shapes depend on T alone."""
        pairs = chosen.flatten()
        count = pairs.shape[0]
        rows = _FEW_ROWS if count <= _FEW_ROWS * experts else _MANY_ROWS
        hits = min(experts, count)
        most = (count + hits * (rows - 1)) // rows
        sizes = pairs.new_zeros(experts).scatter_add_(0, pairs, torch.ones_like(pairs))
        ends = sizes.cumsum(0)
        blocks = (sizes + rows - 1) // rows
        block_ends = blocks.cumsum(0)
        at = torch.arange(most, device=pairs.device)
        # Blocks that are not used are behind the end of the last expert.
        owner = torch.searchsorted(block_ends, at, right=True).clamp(max=experts - 1)
        starts = (ends - sizes)[owner] + (at - (block_ends - blocks)[owner]) * rows
        return cls(torch.argsort(pairs, stable=True), owner, starts, torch.minimum(starts + rows, ends[owner]), rows)


class GroupedExperts:
    """The experts of a mixture on a device: two products and an activation, whatever the tokens chose."""

    def __init__(self, gate_ups: Sequence[Tensor], downs: Sequence[Tensor]) -> None:
        """Shapes: of each expert a gate_up [2 * inner, hidden] and a down [hidden, inner], contiguous, of one type."""
        self._gate_ups, self._downs = tuple(gate_ups), tuple(downs)
        self._addresses = tuple(
            torch.tensor([weight.data_ptr() for weight in weights], dtype=torch.int64, device=weights[0].device)
            for weights in (self._gate_ups, self._downs)
        )

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Return the outputs of the chosen experts for each token, rounded to x's dtype.

        Shapes: x [T, hidden] contiguous, of the weights' type, chosen [T, per_token] int64; returns [T, per_token,
                hidden].
        Cost:   each tile of a hit expert's weights is read once for each of its blocks of rows.
        """
        blocks = ExpertBlocks.of(chosen, len(self._downs))
        per_token = chosen.shape[1]
        inner = silu_mul(_multiply(x, self._addresses[0], self._gate_ups[0], blocks, per_token))
        return _multiply(inner, self._addresses[1], self._downs[0], blocks, 1).view(*chosen.shape, -1)


def _multiply(x: Tensor, addresses: Tensor, like: Tensor, blocks: ExpertBlocks, per_row: int) -> Tensor:
    """Return the product of each pair. `per_row`: pairs that read the same row of x; `like`: one of the weights.

    Shapes: x [pairs / per_row, inputs]; returns [pairs, outputs].
    """
    outputs, inputs = like.shape
    out = x.new_empty(blocks.order.shape[0], outputs)
    expert_product_kernel[(blocks.starts.shape[0], triton.cdiv(outputs, _COLUMNS))](
        x, addresses, blocks.order, blocks.experts, blocks.starts, blocks.ends, out, per_row, inputs, outputs,
        ROWS=blocks.rows, COLUMNS=_COLUMNS, DEPTH=_DEPTH_BYTES // x.element_size(),
        PRECISION="ieee" if x.element_size() == 4 else "tf32",
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
