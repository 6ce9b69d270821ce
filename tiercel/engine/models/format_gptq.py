"""The GPTQ and AWQ formats: integers of 4 or 8 bits in 32-bit words, groups of inputs with a scale and a zero point.

GPTQ packs the inputs of an output, and zero points along the outputs; version 1 stores zero points minus one. AWQ packs
eight outputs of an input in the order 0 2 4 6 1 3 5 7. Layouts: AutoGPTQ, GPTQModel and AutoAWQ, as vLLM reads them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tiercel.engine.models.activation_rounding import quantize_weight
from tiercel.engine.models.config import ConfigFields
from tiercel.engine.models.packed_integers import split_columns, split_words, with_sign
from tiercel.engine.models.quantization import (
    UNSUPPORTED,
    NamePattern,
    Rule,
    StoredTensor,
    WrongTensorError,
    check_expression,
    check_finite,
    count_bytes,
    group_size_for,
    order_of,
    read_group_size,
    read_patterns,
    text_of_groups,
)
from tiercel.engine.models.quantized_weight import QuantizedWeight
from tiercel.values.errors import ConfigError

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # where in a word the outputs 0 to 7 are


def affine_weight(
    integers: Tensor, zeros: Tensor, scales: Tensor, order: Tensor | None, group_size: int, bits: int
) -> QuantizedWeight:
    """Return the weight scales * (integers - zeros).

    Without offsets if every zero point is the middle of the range. Shapes: integers [outputs, inputs] uint8, sorted by
    group; zeros [outputs, groups] of any integers; scales [outputs, groups] float32.
    """
    middle = 1 << bits - 1
    if bool((zeros == middle).all()):
        return QuantizedWeight(with_sign(integers, bits), scales, None, order, group_size, bits)
    if bits == 4:
        return QuantizedWeight(integers.view(torch.int8), scales, scales * -zeros.float(), order, group_size, bits)
    offsets = scales * (middle - zeros.float())
    return QuantizedWeight(with_sign(integers, bits), scales, offsets, order, group_size, bits)


def draw_affine(weight: Tensor, bits: int, group_size: int, is_symmetric: bool) -> QuantizedWeight:
    """Return a weight near `weight` with this number of bits; groups may be others than the format's."""
    drawn = quantize_weight(weight.reshape(-1, group_size), 8)
    outputs, inputs = weight.shape
    narrow = 16 if bits == 4 else 1
    values = torch.div(drawn.values, narrow, rounding_mode="floor").view(outputs, inputs)
    scales = drawn.scales.view(outputs, -1) * narrow
    if is_symmetric:
        return QuantizedWeight(values, scales, None, None, group_size, bits)
    if bits == 4:
        return QuantizedWeight(values + 8, scales, scales * -8, None, group_size, bits)
    return QuantizedWeight(values, scales, torch.zeros_like(scales), None, group_size, bits)


def _refuse_unpackable(layer: str, name: str, size: int, bits: int, source: str) -> None:
    if size % (32 // bits):
        raise ConfigError(UNSUPPORTED, f"{source}: {layer} has {size:,} {name}, which is no multiple of {32 // bits}")


_ROUTER = NamePattern("regex", r"model\.layers\.\d+\.(mlp|block_sparse_moe)\.gate$")


@dataclass(frozen=True, slots=True)
class GptqFormat:
    """A weight as GPTQ stores it. `group_size`: -1: one scale per output."""

    source: str
    bits: int
    group_size: int
    is_symmetric: bool
    version: int  # 1: zero points are stored minus one

    @property
    def text(self) -> str:
        """See `LayerFormat.text`."""
        kind = "" if self.is_symmetric else ", zero points"
        return f"int{self.bits}, {text_of_groups(self.group_size)}{kind}"

    def tensors(self, layer: str, outputs: int, inputs: int) -> Mapping[str, StoredTensor]:
        """See `LayerFormat.tensors`."""
        size = group_size_for(layer, inputs, self.group_size, self.source)
        _refuse_unpackable(layer, "inputs", inputs, self.bits, self.source)
        _refuse_unpackable(layer, "outputs", outputs, self.bits, self.source)
        words = 32 // self.bits
        return {
            "weight": StoredTensor(("qweight",), (torch.int32,), ((inputs // words, outputs),)),
            "zeros": StoredTensor(("qzeros",), (torch.int32,), ((inputs // size, outputs // words),)),
            "scales": StoredTensor(("scales",), _FLOATS, ((inputs // size, outputs),)),
            "groups": StoredTensor(("g_idx",), (torch.int32, torch.int64), ((inputs,),), is_optional=True),
            # Written for layers that have no bias in the model, too; then it is zero.
            "bias": StoredTensor(("bias",), _FLOATS, ((outputs,),), is_optional=True),
        }

    def stored_bytes(self, outputs: int, inputs: int) -> int:
        """See `LayerFormat.stored_bytes`."""
        size = inputs if self.group_size == -1 else self.group_size
        return count_bytes(outputs, inputs, self.bits, size, not self.is_symmetric)

    def read(self, found: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        """See `LayerFormat.read`."""
        if "bias" in found and bool(found["bias"].any()):
            raise WrongTensorError("bias", "this architecture has no bias here, and it is not zero")
        size = inputs if self.group_size == -1 else self.group_size
        scales = check_finite("scales", found["scales"]).t().contiguous()
        order = order_of("groups", found["groups"], size) if "groups" in found else None
        integers = split_columns(found["weight"], self.bits, inputs)
        if order is not None:
            integers = integers[:, order]
        zeros = split_words(found["zeros"], self.bits, outputs).t()
        return affine_weight(integers.contiguous(), self._zero_points(zeros), scales, order, size, self.bits)

    def _zero_points(self, stored: Tensor) -> Tensor:
        middle, wide = 1 << self.bits - 1, stored.to(torch.int32)
        # Some tools write the version 2 and say 1. Symmetric weights have one possible zero point, so it is seen.
        if self.version == 2 or (self.is_symmetric and bool((wide == middle).all())):
            return wide
        return (wide + 1) & ((1 << self.bits) - 1)  # 0 is written as the largest number

    def draw(self, weight: Tensor) -> QuantizedWeight:
        """See `LayerFormat.draw`."""
        size = weight.shape[1] if self.group_size == -1 else self.group_size
        return draw_affine(weight, self.bits, size, self.is_symmetric)


@dataclass(frozen=True, slots=True)
class AwqFormat:
    """A weight of 4 bits as AutoAWQ stores it in its layout `gemm`."""

    source: str
    group_size: int
    has_zeros: bool

    @property
    def text(self) -> str:
        """See `LayerFormat.text`."""
        return f"int4, {text_of_groups(self.group_size)}{', zero points' if self.has_zeros else ''}"

    def tensors(self, layer: str, outputs: int, inputs: int) -> Mapping[str, StoredTensor]:
        """See `LayerFormat.tensors`."""
        size = group_size_for(layer, inputs, self.group_size, self.source)
        _refuse_unpackable(layer, "outputs", outputs, 4, self.source)
        zeros = ((inputs // size, outputs // 8),)
        return {
            "weight": StoredTensor(("qweight",), (torch.int32,), ((inputs, outputs // 8),)),
            "zeros": StoredTensor(("qzeros",), (torch.int32,), zeros, is_optional=not self.has_zeros),
            "scales": StoredTensor(("scales",), _FLOATS, ((inputs // size, outputs),)),
        }

    def stored_bytes(self, outputs: int, inputs: int) -> int:
        """See `LayerFormat.stored_bytes`."""
        size = inputs if self.group_size == -1 else self.group_size
        return count_bytes(outputs, inputs, 4, size, self.has_zeros)

    def read(self, found: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        """See `LayerFormat.read`."""
        size = inputs if self.group_size == -1 else self.group_size
        scales = check_finite("scales", found["scales"]).t().contiguous()
        integers = _split_awq(found["weight"], outputs)
        zeros = _split_awq(found["zeros"], outputs) if "zeros" in found else torch.full_like(scales, 8)
        return affine_weight(integers, zeros, scales, None, size, 4)

    def draw(self, weight: Tensor) -> QuantizedWeight:
        """See `LayerFormat.draw`."""
        size = weight.shape[1] if self.group_size == -1 else self.group_size
        return draw_affine(weight, 4, size, not self.has_zeros)


def _split_awq(words: Tensor, outputs: int) -> Tensor:
    """Shapes: [n, outputs / 8] int32 -> [outputs, n] uint8."""
    nibbles = split_words(words, 4, outputs).unflatten(1, (-1, 8))
    return nibbles[:, :, _AWQ_PLACES].flatten(1).t().contiguous()


def read_awq(fields: ConfigFields) -> tuple[Rule, ...]:
    """Read the rules of `quant_method: awq`. Errors: ConfigError naming the field."""
    version = fields.read("version", str, fields.read("format", str, "gemm")).lower()
    if version != "gemm":
        raise ConfigError(UNSUPPORTED, f"{fields.source}: version: {version} is not supported, only gemm is")
    bits = fields.read("bits", int, 4)
    if bits != 4:
        raise ConfigError(UNSUPPORTED, f"{fields.source}: bits: {bits} is not supported for awq, only 4 is")
    source = f"{fields.source}: modules_to_not_convert"
    kept = read_patterns(fields.raw("modules_to_not_convert"), source, "part")
    form = AwqFormat(fields.source, read_group_size(fields, 128), fields.read("zero_point", bool, True))
    return Rule((NamePattern("exact", "lm_head"), *kept), None), Rule((NamePattern("class", ""),), form)


def read_gptq(fields: ConfigFields) -> tuple[Rule, ...]:
    """Read the rules of `quant_method: gptq`. Errors: ConfigError naming the field."""
    name = "checkpoint_format" if fields.has("checkpoint_format") else "format"
    version = fields.choice(name, ("gptq", "gptq_v2"), "gptq")
    form = _gptq_format(fields, GptqFormat(fields.source, 4, 128, True, 2 if version == "gptq_v2" else 1))
    rules: list[Rule] = []
    if not fields.has("autoround_version"):
        # The tools of GPTQ leave routers of mixtures as they are, and their configurations do not say so.
        rules.append(Rule((_ROUTER,), None))
    if not fields.read("lm_head", bool, False):
        rules.append(Rule((NamePattern("exact", "lm_head"),), None))
    dynamic = fields.object("dynamic")
    for expression in dynamic.names() if dynamic is not None else ():
        assert dynamic is not None
        plain = re.sub(r"^[+-]:", "", expression)
        check_expression(plain, dynamic.source)
        if expression.startswith("-:"):
            rules.append(Rule((NamePattern("regex", plain),), None))
        elif (changed := dynamic.object(expression)) is not None:
            rules.append(Rule((NamePattern("regex", plain),), _gptq_format(changed, form)))
    named = _layers_of_blocks(fields)
    patterns = tuple(NamePattern("part", layer) for layer in named) if named else (NamePattern("class", ""),)
    return *rules, Rule(patterns, form)


def _gptq_format(fields: ConfigFields, default: GptqFormat) -> GptqFormat:
    bits = fields.read("bits", int, default.bits)
    if bits not in (4, 8):
        raise ConfigError(UNSUPPORTED, f"{fields.source}: bits: {bits} is not supported for gptq, only 4 and 8 are")
    size = read_group_size(fields, default.group_size)
    is_symmetric = fields.read("sym", bool, default.is_symmetric)
    return replace(default, bits=bits, group_size=size, is_symmetric=is_symmetric)


def _layers_of_blocks(fields: ConfigFields) -> tuple[str, ...]:
    """Return the names in `modules_in_block_to_quantize`, a list of lists; empty: all layers."""
    groups = fields.raw("modules_in_block_to_quantize")
    if groups is None:
        return ()
    source = f"{fields.source}: modules_in_block_to_quantize"
    if not isinstance(groups, list):
        raise ConfigError("model.field_wrong", f"{source} must be a list, not {groups!r:.200}")
    patterns = [pattern for group in groups for pattern in read_patterns(group, source, "part")]
    return tuple(pattern.text for pattern in patterns)
