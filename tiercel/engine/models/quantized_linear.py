"""The product with a quantised weight in torch: the reference for kernels, and what computes where there are none."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tiercel.engine.models.activation_rounding import round_activations
from tiercel.engine.models.quantized_weight import ActivationKind, QuantizedWeight

_PIECE = 1 << 22  # weights that are in memory as floating-point numbers at once


@dataclass(frozen=True, slots=True)
class WeightForm:
    """The properties that two weights must share to be the rows of one; see `QuantizedWeight`."""

    inputs: int
    group_size: int
    bits: int
    dtype: torch.dtype  # of values of 8 bits
    has_offsets: bool
    activations: ActivationKind | None
    activation_scale: float | None
    activation_group: int | None


@dataclass(frozen=True, slots=True)
class CompactWeight:
    """A quantised weight in the memory that its bits take: two values of 4 bits share a byte.

    Scales and offsets are kept in 16 bits where that changes none of them.
    """

    form: WeightForm
    values: Tensor  # [outputs, inputs], or [outputs, inputs / 2] uint8 with the even inputs in the low halves
    scales: Tensor
    offsets: Tensor | None
    order: Tensor | None

    @classmethod
    def of(cls, weight: QuantizedWeight) -> "CompactWeight":
        """Return a weight that may share values of 8 bits with `weight`, and nothing else."""
        form = WeightForm(
            *(weight.values.shape[1], weight.group_size, weight.bits, weight.values.dtype),
            *(weight.offsets is not None, weight.activations, weight.activation_scale, weight.activation_group),
        )
        values = _join_nibbles(weight.values) if weight.bits == 4 else weight.values
        offsets = None if weight.offsets is None else _narrow(weight.offsets)
        return cls(form, values, _narrow(weight.scales), offsets, weight.order)

    @property
    def outputs(self) -> int:
        """The number of rows."""
        return self.values.shape[0]

    @property
    def nbytes(self) -> int:
        """The bytes in memory."""
        parts = (self.values, self.scales, self.offsets, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    def to(self, device: torch.device) -> "CompactWeight":
        """Return the weight in the memory of a device."""
        offsets = None if self.offsets is None else self.offsets.to(device)
        order = None if self.order is None else self.order.to(device)
        return CompactWeight(self.form, self.values.to(device), self.scales.to(device), offsets, order)

    def joins(self, other: "CompactWeight") -> bool:
        """Return whether both weights can be the rows of one."""
        if self.form != other.form or (self.order is None) != (other.order is None):
            return False
        return self.order is None or other.order is None or torch.equal(self.order, other.order)

    @staticmethod
    def join(weights: Sequence["CompactWeight"]) -> "CompactWeight":
        """Return one weight with the rows of all, which `joins` allows."""
        first = weights[0]
        if len(weights) == 1:
            return first
        values = torch.cat([one.values.view(torch.uint8) for one in weights]).view(first.values.dtype)
        scales = torch.cat([one.scales.float() for one in weights])
        offsets = [one.offsets.float() for one in weights if one.offsets is not None]
        joined = _narrow(torch.cat(offsets)) if offsets else None
        return CompactWeight(first.form, values, _narrow(scales), joined, first.order)

    def canonical(self, start: int = 0, end: int | None = None) -> QuantizedWeight:
        """Return the rows from `start` to `end` in the canonical form."""
        rows = slice(start, end)
        offsets = None if self.offsets is None else self.offsets[rows]
        return self._expand(self.values[rows], self.scales[rows], offsets, self.order)

    def _expand(self, values: Tensor, scales: Tensor, offsets: Tensor | None, order: Tensor | None) -> QuantizedWeight:
        form = self.form
        return QuantizedWeight(
            values=_split_nibbles(values, form.inputs, form.has_offsets) if form.bits == 4 else values,
            scales=scales.float(),
            offsets=None if offsets is None else offsets.float(),
            order=order,
            group_size=form.group_size,
            bits=form.bits,
            activations=form.activations,
            activation_scale=form.activation_scale,
            activation_group=form.activation_group,
        )

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product in x's dtype. Shapes: x [T, inputs] -> [T, outputs].

        A layer whose activations are not rounded multiplies by weights of x's dtype; rounded activations are multiplied
        in float32.

        Cost: some megabytes of weights are in memory as floating-point numbers at once.
        """
        form, read, dtype = self.form, x, x.dtype
        if form.activations is not None:
            read = round_activations(x, form.activations, form.activation_scale, form.activation_group)
            dtype = torch.float32
        if self.order is not None:
            read = read.index_select(1, self.order)  # instead of the inputs of every weight
        y = torch.empty(x.shape[0], self.outputs, dtype=x.dtype, device=x.device)
        rows = max(1, _PIECE // form.inputs)
        for start in range(0, self.outputs, rows):
            piece = slice(start, start + rows)
            offsets = None if self.offsets is None else self.offsets[piece]
            weight = self._expand(self.values[piece], self.scales[piece], offsets, None).dequantize(dtype)
            y[:, piece] = F.linear(read, weight, None if bias is None else bias[piece].to(dtype))
        return y

    def embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows of the weight in `dtype`. Shapes: tokens [T] int64 -> [T, inputs]. Errors: IndexError."""
        values = self.values.view(torch.uint8)[tokens].view(self.values.dtype)
        offsets = None if self.offsets is None else self.offsets[tokens]
        return self._expand(values, self.scales[tokens], offsets, self.order).dequantize(dtype)


def _narrow(numbers: Tensor) -> Tensor:
    """Return numbers in a type of 16 bits that holds all of them exactly, if there is one."""
    for dtype in (torch.float16, torch.bfloat16):
        short = numbers.to(dtype)
        if torch.equal(short.float(), numbers):
            return short
    return numbers


def _join_nibbles(values: Tensor) -> Tensor:
    """Shapes: [rows, inputs] int8 of 4 bits -> [rows, half of the inputs] uint8, the even ones in the low halves."""
    raw = values.view(torch.uint8)
    if raw.shape[1] % 2:
        raw = F.pad(raw, (0, 1))
    return (raw[:, ::2] & 15).bitwise_or_(raw[:, 1::2] << 4)


def _split_nibbles(packed: Tensor, inputs: int, is_unsigned: bool) -> Tensor:
    """Return what `_join_nibbles` joined; numbers with a sign are from -8 to 7. Shapes: -> [rows, inputs] int8."""
    both = torch.empty(packed.shape[0], 2 * packed.shape[1], dtype=torch.uint8, device=packed.device)
    torch.bitwise_and(packed, 15, out=both[:, ::2])
    torch.bitwise_right_shift(packed, 4, out=both[:, 1::2])
    values = both.view(torch.int8) if is_unsigned else both.bitwise_xor_(8).view(torch.int8).sub_(8)
    return values if values.shape[1] == inputs else values[:, :inputs].contiguous()
