"""The sum with the residual and its norm, in one pass."""

# Triton rewrites decorated functions, so a type checker cannot check their calls.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def add_norm_kernel(
    x, residual, weight, normed, size, eps, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):  # one program per row
    at = tl.arange(0, BLOCK)
    inside = at < size
    row = tl.program_id(0).to(tl.int64) * size + at
    total = tl.load(x + row, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        total = (tl.load(residual + row, mask=inside, other=0.0).to(tl.float32) + total.to(tl.float32)).to(total.dtype)
        tl.store(residual + row, total, mask=inside)
    wide = total.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    scaled = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) * wide.to(total.dtype).to(tl.float32)
    tl.store(normed + row, scaled.to(total.dtype), mask=inside)


def add_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the root-mean-square norm of x + residual, and the sum, which is rounded to the dtype before the norm.

    Shapes:  x and residual [T, size] contiguous, weight [size]; returns two [T, size].
    Cost:    one kernel; every tensor is read or written once.
    Effects: with a residual, x is overwritten with the norm and the residual with the sum.
    """
    rows, size = x.shape
    block = triton.next_power_of_2(size)
    total, normed = (x, torch.empty_like(x)) if residual is None else (residual, x)
    add_norm_kernel[(rows,)](
        x, total, weight, normed, size, eps, residual is not None, block, num_warps=min(max(block // 512, 1), 16)
    )
    return normed, total
