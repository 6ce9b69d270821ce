"""The MLP's activation and product, in one pass."""

# Triton rewrites decorated functions, so a type checker cannot check their calls.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def silu_mul_kernel(gate_up, out, size, BLOCK: tl.constexpr):  # one program per row and block of columns
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_up + row * 2 * size + at, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * size + size + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    gated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out + row * size + at, (gated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up; silu(gate) is rounded to the dtype before the product.

    Shapes: gate_up [T, 2 * inner] contiguous, gate first; returns [T, inner].
    Cost:   one kernel; every tensor is read or written once.
    """
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    silu_mul_kernel[(rows, triton.cdiv(size, _BLOCK))](gate_up, out, size, _BLOCK)
    return out
