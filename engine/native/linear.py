"""Matrix products with weights of 16 bits in the layout of the native kernels."""

import ctypes

import torch
from torch import Tensor

from tiercel.engine.native.huge_pages import WeightMemory
from tiercel.engine.native.library import NativeLibrary
from tiercel.engine.native.table import TYPE_BY_DTYPE, LinearWeights

PACKED_DTYPES = (torch.bfloat16, torch.float16)
"""The types of weights that `PackedLinear` takes."""

_MEMORY = WeightMemory()  # of the process: layers of one model share chunks


class PackedLinear:
    """A packed copy of the weight and the bias of a linear layer. The products have sums in float32.

    A row of a result depends on its row of x alone, not on the other rows or the number of threads.
    """

    def __init__(self, library: NativeLibrary, weight: Tensor, bias: Tensor | None) -> None:
        """Shapes: weight [outputs, inputs] bfloat16 or float16, bias [outputs]; both may be freed afterwards."""
        self.outputs, self.inputs = weight.shape
        self._library = library
        self._type = TYPE_BY_DTYPE[weight.dtype]
        self._packed = _MEMORY.take(library.linear_bytes(self.outputs, self.inputs))
        self._bias = None if bias is None else bias.float()
        self._pointers = (self._packed.data_ptr(), None if self._bias is None else self._bias.data_ptr())
        source = weight.contiguous()
        library.linear_pack(self._type, source.data_ptr(), self._pointers[0], self.outputs, self.inputs)

    @property
    def weights(self) -> LinearWeights:
        """The weights as the kernels see them; valid as long as this object lives."""
        return LinearWeights(*self._pointers, self.outputs, self.inputs, self._type)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product in x's dtype. Shapes: x [T, inputs] float32, bfloat16 or float16 -> [T, outputs]."""
        if not x.is_contiguous():
            x = x.contiguous()
        rows, dtype = x.shape[0], x.dtype
        y = torch.empty((rows, self.outputs), dtype=dtype)
        packed, bias = self._pointers
        self._library.linear(
            *(self._type, TYPE_BY_DTYPE[dtype], x.data_ptr(), packed, bias, y.data_ptr()),
            *(rows, self.outputs, self.inputs),
        )
        return y

    def embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows of the weight. Shapes: tokens [T] int64 -> [T, inputs] of `dtype`.

        Errors: IndexError if a token is not less than `outputs`.
        """
        tokens = tokens.contiguous()
        count, (packed, _) = tokens.shape[0], self._pointers
        rows = torch.empty((count, self.inputs), dtype=dtype)
        is_good = self._library.embed(
            *(self._type, TYPE_BY_DTYPE[dtype], tokens.data_ptr(), packed, rows.data_ptr()),
            *(count, self.outputs, self.inputs),
        )
        if not is_good:
            raise IndexError(f"a token is not in [0, {self.outputs})")
        return rows


def return_freed_memory() -> None:
    """Return freed memory to the system, where the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
