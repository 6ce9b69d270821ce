"""Products with quantised weights on a GPU: which kernel takes which weight, and the weight in the memory it reads."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tiercel.engine.kernels.product_tiles import ProductTile
from tiercel.engine.kernels.quantized_kv import FP8, INT8
from tiercel.engine.kernels.quantized_product import (
    LEAST_DEPTH,
    ProductWeight,
    RowOperand,
    depth_of,
    multiply,
    pack_nibbles,
    unpack_nibbles,
)
from tiercel.engine.kernels.round_rows import RowRounding, round_rows
from tiercel.engine.models.quantized_linear import CompactWeight
from tiercel.engine.models.quantized_weight import QuantizedWeight

_LEAST_INTEGER_DEPTH = 32  # of a product of tensor cores with 8 bits
_MOST_INTEGER_INPUTS = 1 << 17  # whose products of 8 bits have a sum below 2 ** 31
_SCALED_MULTIPLE = 16  # of the sizes of `torch._scaled_mm`
_MOST_HALF_DEPTH = 64  # inputs of half a step of 4 bits
_PACK_VALUES = 1 << 22  # that are unpacked at once while a weight is packed


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The facts of a device on which products depend.

    has_float8:  the tensor cores multiply float8
    scales_rows: `torch._scaled_mm` takes a scale for each row
    """

    processors: int
    has_float8: bool
    scales_rows: bool

    @classmethod
    def of(cls, device: torch.device) -> "DeviceFacts":
        """Ask a device; waits for it. Without a GPU there is one processor, whose float8 is decoded."""
        if device.type != "cuda":
            return cls(1, has_float8=False, scales_rows=False)
        has_float8 = torch.cuda.get_device_capability(device) >= (8, 9)
        count = torch.cuda.get_device_properties(device).multi_processor_count
        return cls(count, has_float8, has_float8 and can_scale_rows(device))


def can_scale_rows(device: torch.device) -> bool:
    """Return whether `torch._scaled_mm` multiplies rows of float8 with scales of their own on this device.

    The operator is private, and which devices have it depends on the build, so it is tried and its result compared.
    """
    numbers = torch.arange(-8, 8, dtype=torch.float32, device=device)
    rows = numbers.repeat(16, 1).to(torch.float8_e4m3fn)
    scales = torch.arange(1, 17, dtype=torch.float32, device=device)
    try:
        got = _multiply_rows(rows, rows, scales[:, None], scales[None, :], None)
    except (RuntimeError, AttributeError, TypeError, ValueError):
        return False
    wanted = float(numbers.square().sum()) * scales[:, None] * scales[None, :]
    return torch.equal(got, wanted.to(torch.bfloat16))


def _multiply_rows(x: Tensor, weight: Tensor, x_scales: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Shapes: x [T, inputs] and weight [outputs, inputs] float8, x_scales [T, 1], scales [1, outputs]; -> bfloat16."""
    product = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    return product(x, weight.t(), x_scales, scales, bias=bias, out_dtype=torch.bfloat16)


class DeviceLinear:
    """A quantised weight in the memory of a GPU, and the bias of its layer.

    Values of 8 bits stay where they are; those of 4 bits are put into another order. See
    `engine.kernels.quantized_product` for sums and rounding.
    """

    @staticmethod
    def pack(weight: CompactWeight, bias: Tensor | None, facts: DeviceFacts) -> "DeviceLinear | None":
        """Return the weight as kernels read it; None if they do not know such a weight. Waits for the device.

        They know values of 4 and 8 bits with a scale for every output or for groups of a multiple of 16 inputs, 32 if
        activations are integers, and activations that stay as they are, or are rounded to the type of the values or,
        beside values of 4 bits, to any. Of a NaN among values of float8 they know nothing.
        """
        return DeviceLinear(weight, bias, facts) if can_multiply(weight) else None

    def __init__(self, weight: CompactWeight, bias: Tensor | None, facts: DeviceFacts) -> None:
        """Use `pack`."""
        form = weight.form
        scales = weight.scales.t().contiguous()
        offsets = None if weight.offsets is None else weight.offsets.t().contiguous()
        is_float8 = form.dtype is torch.float8_e4m3fn
        depth = depth_of(form.inputs, form.group_size, form.activation_group)
        if form.bits == 4:
            depth = min(depth, _MOST_HALF_DEPTH)  # both halves of a step have one scale, if groups are large enough
        self._values = (  # before the scales, to need no more memory than for one copy of the values
            _pack(weight, depth) if form.bits == 4 else weight.values.view(torch.int8)
        )
        self._weight = ProductWeight(
            *(self._values, scales, offsets, form.inputs, weight.outputs, form.group_size, depth, form.bits, is_float8),
            zero=8 if form.bits == 4 and not form.has_offsets else 0,
        )
        # The other copies of values and scales are freed with `weight`; this one shares them with the kernel's.
        own = weight.values[:0] if form.bits == 4 else weight.values
        shared = None if offsets is None else offsets.t()
        self._compact = replace(weight, values=own, scales=scales.t(), offsets=shared)
        self._bias = bias
        self._facts = facts
        self._rounding: RowRounding | None = None
        if form.activations is not None:
            group = None if form.activation_group == form.inputs else form.activation_group
            kind = INT8.value if form.activations == "int8" else FP8.value
            self._rounding = RowRounding(kind, form.activation_scale, group)
        self._rows_are_scaled = facts.scales_rows and _fits_scaled_rows(weight)

    def storage(self) -> tuple[Tensor, ...]:
        """See `PackedProduct.storage`."""
        parts = (self._weight.values, self._weight.scales, self._weight.offsets)
        return tuple(part for part in parts if part is not None)

    def moved(self) -> None:
        """See `PackedProduct.moved`."""
        compact, offsets = self._compact, self._weight.offsets
        values = compact.values if compact.form.bits == 4 else self._weight.values.view(compact.form.dtype)
        shared = None if offsets is None else offsets.t()
        self._compact = replace(compact, values=values, scales=self._weight.scales.t(), offsets=shared)

    @property
    def nbytes(self) -> int:
        """The bytes in memory."""
        weight, order = self._weight, self._compact.order
        parts = (weight.values, weight.scales, weight.offsets, order)
        return sum(part.nbytes for part in parts if part is not None)

    def forward(self, x: Tensor, tile: ProductTile | None = None) -> Tensor:
        """Return the product in x's dtype. All launches depend on the shapes alone, and nothing waits.

        Shapes: x [T, inputs] -> [T, outputs]. `tile`: instead of the one of the table.
        """
        order, rounding, facts = self._compact.order, self._rounding, self._facts
        read = x.contiguous() if order is None else x.index_select(1, order)  # instead of the inputs of every weight
        if rounding is None:
            operand = RowOperand(read)
        else:
            numbers, scales = round_rows(read, rounding)
            if self._rows_are_scaled and x.dtype is torch.bfloat16 and tile is None:
                return self._scale_rows(numbers, scales)
            operand = RowOperand(numbers, rounding.format, scales, rounding.group)
        return multiply(
            operand, self._weight, self._bias, x.dtype, facts.processors, has_float8=facts.has_float8, tile=tile
        )

    def _scale_rows(self, numbers: Tensor, scales: Tensor) -> Tensor:
        numbers, bias = numbers.view(torch.float8_e4m3fn), self._bias
        own = None if bias is None else bias.to(torch.bfloat16)
        return _multiply_rows(numbers, self._compact.values, scales, self._weight.scales.float(), own)

    def embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows of the weight in `dtype`. Shapes: tokens [T] int64 -> [T, inputs]. Errors: IndexError."""
        weight, compact = self._weight, self._compact
        if weight.bits == 8:
            return compact.embed(tokens, dtype)
        values = unpack_nibbles(weight.values[:, tokens], weight.inputs).sub_(weight.zero)
        offsets = None if compact.offsets is None else compact.offsets[tokens].float()
        scales = compact.scales[tokens].float()
        return QuantizedWeight(values, scales, offsets, compact.order, weight.group, 4).dequantize(dtype)


def can_multiply(weight: CompactWeight) -> bool:
    """Return whether `DeviceLinear` takes a weight; see `DeviceLinear.pack`."""
    form = weight.form
    inputs, group = form.inputs, form.group_size
    has_integers = form.dtype is torch.int8
    depth = depth_of(inputs, group, form.activation_group)
    if form.bits not in (4, 8) or not inputs or (group != inputs and inputs % group):
        return False
    if not has_integers and (form.bits != 8 or _has_nan(weight.values)):
        return False
    match form.activations:
        case None:
            return depth >= LEAST_DEPTH
        case "int8":
            is_whole = form.activation_group in (None, inputs)
            least = _LEAST_INTEGER_DEPTH
            return has_integers and is_whole and depth >= least and inputs <= _MOST_INTEGER_INPUTS
        case "fp8":
            is_ordered = weight.order is None or form.activation_group in (None, inputs)
            return (form.bits == 4 or not has_integers) and is_ordered and depth >= _LEAST_INTEGER_DEPTH


def _has_nan(values: Tensor) -> bool:
    """Return whether values of float8 have a NaN; of another type they do not count as float8 at all."""
    is_float8 = values.dtype is torch.float8_e4m3fn
    return not is_float8 or bool((values.view(torch.uint8) & 0x7F == 0x7F).any())


def _fits_scaled_rows(weight: CompactWeight) -> bool:
    form = weight.form
    return (
        form.dtype is torch.float8_e4m3fn
        and form.activations == "fp8"
        and form.activation_group in (None, form.inputs)
        and form.group_size == form.inputs
        and weight.offsets is None
        and form.inputs % _SCALED_MULTIPLE == 0
        and weight.outputs % _SCALED_MULTIPLE == 0
    )


def _pack(weight: CompactWeight, depth: int) -> Tensor:
    """Return the values of a weight of 4 bits as `pack_nibbles` orders them, a few megabytes at a time."""
    inputs, outputs = weight.form.inputs, weight.outputs
    packed = torch.empty(-(-inputs // (2 * depth)), outputs, depth, dtype=torch.uint8, device=weight.values.device)
    zero, rows = (0 if weight.form.has_offsets else 8), max(1, _PACK_VALUES // inputs)
    for start in range(0, outputs, rows):
        packed[:, start : start + rows] = pack_nibbles(weight.canonical(start, start + rows).values + zero, depth)
    return packed
