"""Compare the kernels of a class with the portable ones on small shapes, when the library is loaded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.engine.native.table import TYPE_BY_DTYPE, KernelTable

TOLERANCE_BY_DTYPE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest difference, relative to the largest value."""


@dataclass(frozen=True)
class SelfTest:
    """A comparison of kernels that only work together, such as packing and multiplying."""

    kernels: tuple[str, ...]
    run: Callable[[KernelTable], Sequence[Tensor]]

    def compare(self, table: KernelTable, portable: KernelTable) -> str | None:
        """Return what differs between two tables; None if nothing does."""
        for index, (got, expected) in enumerate(zip(self.run(table), self.run(portable), strict=True)):
            scale = expected.abs().max().float().item() or 1.0
            error = (got.float() - expected.float()).abs().max().item() / scale
            if not error <= TOLERANCE_BY_DTYPE[expected.dtype]:
                return f"result={index} relative_error={error:.2g}"
        return None


def _run_add_norm(table: KernelTable) -> list[Tensor]:
    results: list[Tensor] = []
    for dtype, kind in TYPE_BY_DTYPE.items():
        generator = torch.Generator().manual_seed(1)
        x, residual, weight = (torch.randn(3, 37, generator=generator).to(dtype) for _ in range(3))
        out = torch.empty_like(x)
        table.add_norm(kind, x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), 3, 37, 1e-5)
        results += [out, residual]
    return results


CHECKS: tuple[SelfTest, ...] = (SelfTest(("add_norm",), _run_add_norm),)
"""A test for every kernel of the table."""
