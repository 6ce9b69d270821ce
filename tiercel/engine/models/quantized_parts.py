"""The weights of one matrix product of which at least one layer of the checkpoint is quantised."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tiercel.engine.models.quantization import LayerFormat, StoredTensor
from tiercel.engine.models.quantized_linear import CompactWeight
from tiercel.engine.models.quantized_weight import QuantizedWeight
from tiercel.engine.native.library import NativeLibrary
from tiercel.engine.native.linear import PACKED_DTYPES, PackedLinear

_DEQUANTIZED_NUMBERS = 1 << 20  # at once; they are float32


class QuantizedTarget:
    """The memory of one quantised layer of the checkpoint, which takes several tensors at once."""

    def __init__(
        self,
        layer: str,
        form: LayerFormat,
        shape: tuple[int, int],
        device: torch.device,
        take: Callable[[CompactWeight], None],
    ) -> None:
        """`shape`: outputs and inputs. `take`: gets the loaded weight. Errors: ConfigError; see `LayerFormat`."""
        self.tensors: Mapping[str, StoredTensor] = form.tensors(layer, *shape)
        self.shape = shape
        self.nbytes = form.stored_bytes(*shape)  # until the weight is loaded, what it takes at least
        self._form = form
        self._device = device
        self._take = take

    def load(self, found: Mapping[str, Tensor]) -> None:
        """Take the tensors of the checkpoint, by role. Nothing is read for a meta device.

        Errors: WrongTensorError.
        """
        if self._device.type != "meta":
            self._keep(self._form.read(found, *self.shape))

    def draw(self, std: float, generator: torch.Generator) -> None:
        """Take a weight that is near a normal one of this deviation."""
        weight = torch.empty(self.shape).normal_(0.0, std, generator=generator)
        self._keep(self._form.draw(weight))

    def _keep(self, weight: QuantizedWeight) -> None:
        compact = CompactWeight.of(weight)
        self.nbytes = compact.nbytes
        self._take(compact.to(self._device))


class DequantizedTarget(QuantizedTarget):
    """The memory of a layer that is quantised in the checkpoint alone."""

    def __init__(self, layer: str, form: LayerFormat, memory: Tensor) -> None:
        """`memory`: [outputs, inputs], of any floating-point type. Errors: ConfigError; see `LayerFormat`."""
        super().__init__(layer, form, (memory.shape[0], memory.shape[1]), memory.device, lambda _: None)
        self.nbytes = memory.nbytes
        self._memory = memory

    def _keep(self, weight: QuantizedWeight) -> None:
        rows = max(1, _DEQUANTIZED_NUMBERS // weight.values.shape[1])
        for start in range(0, weight.values.shape[0], rows):
            part = slice(start, start + rows)
            offsets = None if weight.offsets is None else weight.offsets[part]
            piece = replace(weight, values=weight.values[part], scales=weight.scales[part], offsets=offsets)
            self._memory[part] = piece.dequantize().to(self._memory)


class PackedProduct(Protocol):
    """A weight as kernels read it, with the bias."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the product in x's dtype. Shapes: x [T, inputs] -> [T, outputs]."""
        ...

    def embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows of the weight in `dtype`. Shapes: tokens [T] int64 -> [T, inputs]. Errors: IndexError."""
        ...

    def storage(self) -> Sequence[Tensor]:
        """Return the tensors that hold the weight. `Tensor.set_` gives them other memory; `moved` must follow."""
        ...

    def moved(self) -> None:
        """Note that the tensors of `storage` have other memory with the same bytes."""
        ...


@dataclass(frozen=True, slots=True)
class QuantizedPacker:
    """Kernels that multiply by quantised weights alone. `pack` returns None for a weight that they do not know."""

    pack: Callable[[CompactWeight, Tensor | None], PackedProduct | None]


WeightKernels = NativeLibrary | QuantizedPacker
"""Kernels that read weights in a layout of their own."""


@dataclass(frozen=True, slots=True)
class PartProduct:
    """The rows of a matrix that are multiplied in one product."""

    rows: slice
    weight: Tensor | CompactWeight | PackedProduct

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Shapes: x [T, inputs], bias: of all rows of the matrix -> [T, rows]."""
        own = None if bias is None else bias[self.rows]
        match self.weight:
            case CompactWeight():
                return self.weight.forward(x, own)
            case Tensor():
                return F.linear(x, self.weight.to(x.dtype), own)
            case _:
                return self.weight.forward(x)


class QuantizedParts:
    """The layers of the checkpoint that are multiplied with the same input. Layers that agree in form become one."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        forms: Sequence[LayerFormat | None],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`shapes`: outputs and inputs of each layer; `forms`: None: it stays as it is, in `dtype`."""
        self._shapes = shapes
        self._forms = forms
        self._device = device
        self._parts: list[Tensor | CompactWeight | None] = [
            torch.empty(shape, dtype=dtype, device=device) if form is None else None
            for shape, form in zip(shapes, forms, strict=True)
        ]
        self._products: tuple[PartProduct, ...] = ()  # once all layers are loaded

    def targets(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor | QuantizedTarget]]:
        """Yield the memory of each layer, until all are loaded: under its name, or under that of its only tensor."""
        if self._products:
            return
        for index, (name, form, part) in enumerate(zip(names, self._forms, self._parts, strict=True)):
            if form is not None:
                yield name, QuantizedTarget(name, form, self._shapes[index], self._device, self._taker(index))
            elif isinstance(part, Tensor):
                yield f"{name}.weight", part

    def _taker(self, index: int) -> Callable[[CompactWeight], None]:
        def take(weight: CompactWeight) -> None:
            self._parts[index] = weight
            loaded = [part for part in self._parts if part is not None]
            if len(loaded) == len(self._parts):
                self._products = tuple(_join(loaded))
                self._parts = []

        return take

    @property
    def native(self) -> PackedLinear | None:
        """The only product, if it is packed for the native kernels."""
        only = self._products[0].weight if len(self._products) == 1 else None
        return only if isinstance(only, PackedLinear) else None

    def pack(self, kernels: WeightKernels, bias: Tensor | None) -> None:
        """Replace weights by packed ones for these kernels, where they take them, one after the other."""
        products, self._products = list(self._products), ()
        while products:
            product = products.pop(0)
            own = None if bias is None else bias[product.rows]
            packed = _pack(kernels, product.weight, own)
            self._products = (*self._products, PartProduct(product.rows, packed))

    def storage(self) -> Iterator[Tensor]:
        """Yield the tensors that hold the weights; see `Linear.storage`. The order of inputs stays in its memory."""
        for product in self._products:
            match product.weight:
                case CompactWeight() as weight:
                    yield from (part for part in (weight.values, weight.scales, weight.offsets) if part is not None)
                case Tensor() as weight:
                    yield weight
                case packed:
                    yield from packed.storage()

    def moved(self) -> None:
        """See `Linear.moved`."""
        for product in self._products:
            if not isinstance(product.weight, Tensor | CompactWeight):
                product.weight.moved()

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Shapes: x [T, inputs], bias [outputs of all layers] -> [T, outputs of all layers]."""
        if len(self._products) == 1:
            return self._products[0].forward(x, bias)
        return torch.cat([product.forward(x, bias) for product in self._products], dim=-1)

    def embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows of the weight in `dtype`. Shapes: tokens [T] int64 -> [T, inputs]. Errors: IndexError."""
        weight = self._products[0].weight
        return F.embedding(tokens, weight).to(dtype) if isinstance(weight, Tensor) else weight.embed(tokens, dtype)


def _join(parts: Sequence[Tensor | CompactWeight]) -> Iterator[PartProduct]:
    """Yield the products of neighbouring parts that can be one."""
    start, first = 0, 0
    while first < len(parts):
        one, last = parts[first], first + 1
        if isinstance(one, CompactWeight):
            same = [one]
            while last < len(parts) and isinstance(other := parts[last], CompactWeight) and one.joins(other):
                same.append(other)
                last += 1
            one = CompactWeight.join(same)
        rows = one.outputs if isinstance(one, CompactWeight) else one.shape[0]
        yield PartProduct(slice(start, start + rows), one)
        start, first = start + rows, last


def _pack(
    kernels: WeightKernels, weight: Tensor | CompactWeight | PackedProduct, bias: Tensor | None
) -> Tensor | CompactWeight | PackedProduct:
    """Return the weight as the kernels read it; as it is if they do not know such a weight."""
    if isinstance(kernels, QuantizedPacker):
        return (kernels.pack(weight, bias) or weight) if isinstance(weight, CompactWeight) else weight
    if isinstance(weight, CompactWeight):
        return PackedLinear.quantized(kernels, weight.canonical(), bias) or weight
    if isinstance(weight, Tensor) and weight.dtype in PACKED_DTYPES:
        return PackedLinear(kernels, weight, bias)
    return weight
