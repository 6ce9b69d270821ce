"""The layers of a decoder: plain tensors and functions, with the numerics of transformers."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tiercel.engine.models.dense_routes import DenseRoutes
from tiercel.engine.models.precision import Precision
from tiercel.engine.models.quantized_parts import QuantizedPacker, QuantizedParts, QuantizedTarget, WeightKernels
from tiercel.engine.native.linear import PackedLinear

Target = tuple[str, Tensor | QuantizedTarget]
"""The name of a tensor in a checkpoint, or of a quantised layer, and the memory it is loaded into."""

_PACK_ROWS = 16  # one layout serves every batch; packed for 16 rows it is fast for 1 to 1,024 rows
_MAX_PACKED_FLOAT32 = 1 << 20  # elements; smaller float32 weights are faster unpacked


def can_pack(precision: Precision, device: torch.device) -> bool:
    """Return whether this torch has faster linear layers on this processor for packed weights.

    The two operators of torch are private, so they are tried and their result is compared.
    """
    dtype = precision.weights
    if device.type != "cpu" or precision.activations is not dtype or dtype is torch.float16:
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    x, weight = torch.ones(3, 32, dtype=dtype), torch.eye(48, 32, dtype=dtype)
    try:
        if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        return torch.equal(_packed_linear(x, _pack_weight(weight), None), F.linear(x, weight))
    except (AttributeError, RuntimeError, TypeError):
        return False


def _pack_weight(weight: Tensor) -> Tensor:
    """Return a copy of a weight in oneDNN's opaque layout, for `_packed_linear` only."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the root-mean-square norm: mean square and root in float32, the weight in x's dtype.

    Shapes: x [..., size], weight [size]; returns x's shape.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


class RMSNorm:
    """The weight of a root-mean-square norm."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Norm the last dimension. Shapes: x [..., size] -> same."""
        return rms_norm(x, self.weight, self.eps)


class Linear:
    """One matrix product for one or more linear layers of a checkpoint that have the same input.

    Memory is allocated when it is first asked for: `targets` tells by the layers' names which of them are quantised.
    """

    def __init__(
        self, inputs: int, outputs: tuple[int, ...], has_bias: bool, precision: Precision, device: torch.device
    ) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.bias = torch.empty(sum(outputs), dtype=precision.activations, device=device) if has_bias else None
        self._precision = precision
        self._device = device
        self._weight: Tensor | None = None
        self._quantized: QuantizedParts | None = None
        self._native: PackedLinear | None = None
        self._packed: Tensor | None = None
        self._routes: DenseRoutes | None = None
        self._packs_moved = False  # the weight is packed for oneDNN whenever it has moved

    @classmethod
    def sharing(cls, weight: Tensor, precision: Precision) -> "Linear":
        """Return a layer that shares its weight: a head tied to the embedding."""
        layer = cls(weight.shape[1], (weight.shape[0],), False, precision, weight.device)
        layer._weight = weight
        return layer

    @property
    def weight(self) -> Tensor:
        """The weight of layers that are not quantised, until it is packed. Shape: [sum(outputs), inputs]."""
        if self._weight is None:
            size = sum(self.outputs), self.inputs
            self._weight = torch.empty(size, dtype=self._precision.weights, device=self._device)
        return self._weight

    @property
    def is_quantized(self) -> bool:
        """Whether at least one of the layers is quantised; known after `targets`."""
        return self._quantized is not None

    @property
    def native(self) -> PackedLinear | None:
        """The weight as packed for the native kernels, if it is in one piece."""
        return self._native if self._quantized is None else self._quantized.native

    @property
    def is_plain(self) -> bool:
        """Whether torch multiplies by the weight as it was loaded."""
        return self._quantized is None and self._native is None and self._packed is None

    def route(self, routes: DenseRoutes) -> None:
        """Multiply by the faster of several ways from now on, if the layer is plain."""
        self._routes = routes

    def targets(self, *names: str) -> Iterator[Target]:
        """Yield the tensors of the checkpoint's layers of these names: rows of the matrix, in order.

        Errors: ConfigError if a layer's scheme cannot hold a weight of its size.
        """
        if self._quantized is None and self._weight is None and self._precision.scheme is not None:
            forms = [self._precision.scheme.layer(name) for name in names]
            if any(form is not None for form in forms):
                shapes = [(outputs, self.inputs) for outputs in self.outputs]
                self._quantized = QuantizedParts(shapes, forms, self._precision.weights, self._device)
        if self._quantized is not None:
            yield from self._quantized.targets(names)
        else:
            for name, rows in zip(names, self.weight.split(self.outputs), strict=True):
                yield f"{name}.weight", rows
        if self.bias is not None:
            for name, rows in zip(names, self.bias.split(self.outputs), strict=True):
                yield f"{name}.bias", rows

    def pack(self, kernels: WeightKernels | None = None, *, moves: bool = False) -> None:
        """Replace the loaded weight by a packed one: for the kernels if given, else for oneDNN.

        The native library takes weights of 16 bits and quantised ones, a `QuantizedPacker` quantised ones alone, oneDNN
        those that `can_pack` names. `moves`: see `storage`. The layout of oneDNN is opaque, so such a weight is packed
        after every move.
        """
        if self._quantized is not None:
            if kernels is not None:
                self._quantized.pack(kernels, self.bias)
        elif isinstance(kernels, QuantizedPacker):
            return
        elif kernels is not None:
            self._native = PackedLinear(kernels, self.weight, self.bias)
            self._weight = self.weight.new_empty(0)
        elif self.weight.dtype is not torch.float32 or self.weight.numel() >= _MAX_PACKED_FLOAT32:
            if moves:
                self._packs_moved = True
                return
            self._packed = _pack_weight(self.weight)
            self._weight = self.weight.new_empty(0)

    def storage(self) -> tuple[Tensor, ...]:
        """Return the tensors that hold the weight, once it is loaded and packed with `moves`.

        They may be moved to other memory with `Tensor.set_`; `moved` must follow.
        """
        if self._native is not None:
            return self._native.storage()
        return (self.weight,) if self._quantized is None else tuple(self._quantized.storage())

    def moved(self) -> None:
        """Note that the tensors of `storage` have other memory. Cost: a copy of the weight if oneDNN computes."""
        if self._native is not None:
            self._native.moved()
        elif self._quantized is not None:
            self._quantized.moved()
        elif self._packs_moved:
            self._packed = _pack_weight(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: x [T, inputs], in the type of the activations -> [T, sum(outputs)].

        Cost: without a native kernel, weights of another type are widened in memory first.
        """
        if self._native is not None:
            return self._native.forward(x)
        if self._quantized is not None:
            return self._quantized.forward(x, self.bias)
        if self._packed is not None:
            return _packed_linear(x, self._packed, self.bias)
        weight = self.weight.to(x.dtype)
        return F.linear(x, weight, self.bias) if self._routes is None else self._routes.multiply(x, weight, self.bias)

    def embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows of the weight in `dtype`. Shapes: tokens [T] int64 -> [T, inputs]. Errors: IndexError."""
        if self._native is not None:
            return self._native.embed(tokens, dtype)
        if self._quantized is not None:
            return self._quantized.embed(tokens, dtype)
        return F.embedding(tokens, self.weight).to(dtype)
