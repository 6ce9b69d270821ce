"""Compare the kernels of a class with the portable ones on small shapes, when the library is loaded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.engine.native.table import KernelTable

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
