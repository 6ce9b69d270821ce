"""Matrix products with weights of 16, 8 and 4 bits in the layout of the native kernels."""

import ctypes

import torch
from torch import Tensor

from tiercel.engine.native.huge_pages import WeightMemory
from tiercel.engine.native.library import NativeLibrary
from tiercel.engine.native.quantized import GroupedWeight, NativeForm, can_multiply
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

    @staticmethod
    def quantized(library: NativeLibrary, weight: GroupedWeight, bias: Tensor | None) -> "PackedLinear | None":
        """Return a packed copy of a weight of 4 or 8 bits; None if the kernels cannot multiply by it.

        The result is that of the dequantised weight, with sums in float32, where x is not rounded.
        Shapes: bias [outputs]. Errors: ValueError if the weight says 4 bits and has values of more.
        """
        return QuantizedLinear(library, weight, bias) if can_multiply(weight) else None

    @property
    def weights(self) -> LinearWeights:
        """The weights as the kernels see them; valid as long as this object lives."""
        packed, bias = self._pointers
        return LinearWeights(packed, bias, None, self.outputs, self.inputs, self._type)

    def storage(self) -> tuple[Tensor, ...]:
        """Return the packed weight, uint8. `Tensor.set_` gives it other memory; `moved` must follow."""
        return (self._packed,)

    def moved(self) -> None:
        """Note that the packed weight has other memory with the same bytes, at a multiple of 64."""
        self._pointers = (self._packed.data_ptr(), self._pointers[1])

    @property
    def room_kind(self) -> tuple[int, ...]:
        """The facts of this weight on which `room_bytes` depends."""
        return ()

    def room_bytes(self, dtype: torch.dtype, rows: int) -> int:
        """Return the bytes of memory, aligned to 64, that a product needs beside its operands."""
        del dtype, rows
        return 0

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


class QuantizedLinear(PackedLinear):
    """A packed copy of a weight of 4 or 8 bits and the bias of a linear layer."""

    def __init__(self, library: NativeLibrary, weight: GroupedWeight, bias: Tensor | None) -> None:
        """Everything given may be freed afterwards. Errors: see `NativeForm`."""
        form = NativeForm(weight)
        self._library = library
        self._layout, self._order = form.layout, form.order  # the layout points to the order
        self.outputs, self.inputs = form.layout.outputs, form.layout.inputs
        self._packed = _MEMORY.take(library.quantized_bytes(self._layout))
        self._bias = None if bias is None else bias.float()
        self._pointers = (self._packed.data_ptr(), None if self._bias is None else self._bias.data_ptr())
        offsets = None if form.offsets is None else form.offsets.data_ptr()
        library.quantized_pack(
            *(self._layout, form.values.data_ptr(), form.scales.data_ptr(), offsets, self._pointers[0])
        )

    @property
    def weights(self) -> LinearWeights:
        """See `PackedLinear`."""
        packed, bias = self._pointers
        return LinearWeights(packed, bias, ctypes.pointer(self._layout), self.outputs, self.inputs, 0)

    @property
    def room_kind(self) -> tuple[int, ...]:
        """See `PackedLinear`."""
        layout = self._layout
        return layout.inputs, layout.group, self._order is not None, layout.has_offsets, layout.rounds_x

    def room_bytes(self, dtype: torch.dtype, rows: int) -> int:
        """See `PackedLinear`."""
        return self._library.quantized_room(self._layout, TYPE_BY_DTYPE[dtype], rows)

    def forward(self, x: Tensor) -> Tensor:
        """See `PackedLinear`."""
        if not x.is_contiguous():
            x = x.contiguous()
        rows, dtype = x.shape[0], x.dtype
        y = torch.empty((rows, self.outputs), dtype=dtype)
        room = torch.empty(self.room_bytes(dtype, rows), dtype=torch.uint8)
        packed, bias = self._pointers
        self._library.quantized_linear(
            *(self._layout, TYPE_BY_DTYPE[dtype], x.data_ptr(), packed, bias, y.data_ptr(), rows, room.data_ptr())
        )
        return y

    def embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """See `PackedLinear`."""
        tokens = tokens.contiguous()
        count, (packed, _) = tokens.shape[0], self._pointers
        rows = torch.empty((count, self.inputs), dtype=dtype)
        is_good = self._library.quantized_embed(
            *(self._layout, TYPE_BY_DTYPE[dtype], tokens.data_ptr(), packed, rows.data_ptr(), count)
        )
        if not is_good:
            raise IndexError(f"a token is not in [0, {self.outputs})")
        return rows


def return_freed_memory() -> None:
    """Return freed memory to the system, where the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
