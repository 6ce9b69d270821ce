"""Weights of 4 and 8 bits in the layout of the native kernels."""

from typing import Literal, Protocol

import torch
from torch import Tensor

from tiercel.engine.native.table import TYPE_BY_DTYPE, QuantizedLayout

_GROUPS = (128, 64, 32, 16)
"""Numbers of inputs that share a scale, beside all inputs. Other groups are made of several of these."""

_SCALE_DTYPES = (torch.float16, torch.bfloat16)
"""Types in which scales are packed if they hold them exactly, because they take half the memory of float32."""


class GroupedWeight(Protocol):
    """A quantised weight as `QuantizedWeight` in engine/models/quantized_weight.py describes it."""

    @property
    def values(self) -> Tensor: ...
    @property
    def scales(self) -> Tensor: ...
    @property
    def offsets(self) -> Tensor | None: ...
    @property
    def order(self) -> Tensor | None: ...
    @property
    def group_size(self) -> int: ...
    @property
    def bits(self) -> int: ...
    @property
    def activations(self) -> Literal["int8", "fp8"] | None: ...
    @property
    def activation_scale(self) -> float | None: ...
    @property
    def activation_group(self) -> int | None: ...


def can_multiply(weight: GroupedWeight) -> bool:
    """Return whether the native kernels multiply by a weight as its description says.

    They do so for values of 4 and 8 bits with a scale for every output, or for groups of a multiple of 16 inputs, if x
    is as it is, or values are integers and x is rounded to int8.
    """
    inputs, size = weight.values.shape[1], weight.group_size
    return (
        (_has_integers(weight) or (_has_numbers(weight) and weight.activations is None))
        and weight.activations in (None, "int8")
        and weight.activation_group in (None, inputs)
        and 0 < inputs < 1 << 31
        and weight.scales.shape == (weight.values.shape[0], inputs // size)
        and (size == inputs or (inputs % size == 0 and size % _GROUPS[-1] == 0))
    )


def _has_integers(weight: GroupedWeight) -> bool:
    return weight.values.dtype is torch.int8 and weight.bits in (4, 8)


def _has_numbers(weight: GroupedWeight) -> bool:
    """Return whether values are of float8 and none is a NaN, which the kernels would take for a number."""
    if weight.values.dtype is not torch.float8_e4m3fn or weight.bits != 8:
        return False
    return not bool((weight.values.view(torch.uint8) & 0x7F == 0x7F).any())


class NativeForm:
    """The numbers of a weight as the kernels pack them.

    Groups that the kernels do not know become several with the same scale. Values of 0 to 15 become -8 to 7, with other
    offsets. Weights of 4 bits whose x is rounded are packed as ones of 8 bits.
    """

    def __init__(self, weight: GroupedWeight) -> None:
        """Errors: ValueError if `can_multiply` is false, or a value has more than 4 bits where 4 are said."""
        if not can_multiply(weight):
            raise ValueError("no native kernel multiplies by this weight")
        outputs, inputs = weight.values.shape
        group = _known_group(weight.group_size, inputs)
        self.values = weight.values.contiguous().view(torch.int8)
        self.scales = weight.scales.float()
        self.offsets = None if weight.offsets is None else weight.offsets.float()
        bits = 8 if weight.activations == "int8" else weight.bits
        if bits == 4:
            self._make_signed()
        if repeats := weight.group_size // group - 1:
            self.scales = self.scales.repeat_interleave(repeats + 1, 1)
            self.offsets = None if self.offsets is None else self.offsets.repeat_interleave(repeats + 1, 1)
        self.scales = self.scales.contiguous()
        self.offsets = None if self.offsets is None else self.offsets.contiguous()
        self.order = None if weight.order is None else weight.order.to(torch.int32).contiguous()
        self.layout = QuantizedLayout(
            outputs=outputs,
            inputs=inputs,
            group=group,
            order=None if self.order is None else self.order.data_ptr(),
            bits=bits,
            is_float8=weight.values.dtype is not torch.int8,
            scale_type=TYPE_BY_DTYPE[_narrowest_dtype(self.scales, self.offsets)],
            has_offsets=self.offsets is not None,
            rounds_x=weight.activations == "int8",
            x_scale=weight.activation_scale or 0.0,
        )

    def _make_signed(self) -> None:
        low, high = (int(one) for one in self.values.aminmax())
        if high > 7 and low >= 0 and high <= 15 and self.offsets is not None:
            self.values = self.values - 8
            self.offsets = self.offsets + 8 * self.scales
        elif low < -8 or high > 7:
            raise ValueError(f"values of 4 bits: from {low} to {high}, expected -8 to 7, or 0 to 15 beside offsets")


def _known_group(size: int, inputs: int) -> int:
    return inputs if size == inputs else next(known for known in _GROUPS if size % known == 0)


def _narrowest_dtype(*numbers: Tensor | None) -> torch.dtype:
    """Return the first type that holds all numbers exactly."""
    for dtype in _SCALE_DTYPES:
        if all(one is None or torch.equal(one.to(dtype).float(), one) for one in numbers):
            return dtype
    return torch.float32
