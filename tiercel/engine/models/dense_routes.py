"""The ways in which a GPU can compute a product of 16-bit numbers, and the choice among them by shape."""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

DEFAULT = "cublas"  # what torch chooses
ROUTED_ROWS = (128, 192, 256, 384, 512)
"""The numbers of rows for which ways are compared; other numbers count as the next larger one."""

_FEW_ROWS = 64  # up to this number weights are read at the speed of memory in any way
_Name = str

DenseProduct = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Returns x @ weight.T + bias. Shapes: x [T, inputs], weight [outputs, inputs], bias [outputs]; -> [T, outputs]."""


@dataclass(frozen=True, slots=True)
class DenseRoutes:
    """The choice for each shape of weight (outputs, inputs): a name for each of ROUTED_ROWS."""

    products: Mapping[_Name, DenseProduct]
    names_by_shape: Mapping[tuple[int, int], tuple[_Name, ...]]

    def name_of(self, rows: int, outputs: int, inputs: int) -> _Name:
        """Return the name of the way; the default for other shapes and for very few or many rows."""
        names = self.names_by_shape.get((outputs, inputs))
        if names is None or not _FEW_ROWS < rows <= ROUTED_ROWS[-1]:
            return DEFAULT
        return names[bisect_left(ROUTED_ROWS, rows)]

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute a product in the chosen way. The launch depends on shapes alone. See `DenseProduct`."""
        return self.products[self.name_of(x.shape[0], *weight.shape)](x, weight, bias)


def open_products(processors: int) -> dict[_Name, DenseProduct]:
    """Return the ways of a Hopper GPU or newer: torch's choice, cuBLASLt, and the kernel of this project."""
    # lazy: CPU builds of torch come without Triton
    from tiercel.engine.kernels.dense_product import multiply_dense

    return {
        DEFAULT: F.linear,
        "cublaslt": multiply_lt,
        "triton": lambda x, weight, bias: multiply_dense(x, weight, bias, processors),
    }


def multiply_lt(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a product by cuBLASLt, whose heuristics choose other kernels. One thread at a time may do so.

    Errors: RuntimeError if torch was built without it.
    """
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        return F.linear(x, weight, bias)
    finally:
        torch.backends.cuda.preferred_blas_library(before)
