"""The formats of the compressed-tensors package, which llm-compressor writes: packed integers, int8 and fp8.

Layout and meaning: https://github.com/vllm-project/compressed-tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from tiercel.engine.models.config import ConfigFields
from tiercel.engine.models.format_fp8 import expand_blocks, quantize_to_fp8, read_input_scale
from tiercel.engine.models.format_gptq import affine_weight, draw_affine
from tiercel.engine.models.packed_integers import split_columns, split_words
from tiercel.engine.models.quantization import (
    UNSUPPORTED,
    LayerFormat,
    NamePattern,
    Rule,
    StoredTensor,
    WrongTensorError,
    check_finite,
    count_bytes,
    group_size_for,
    order_of,
    read_block,
    read_group_size,
    read_pattern,
    read_patterns,
    text_of_groups,
)
from tiercel.engine.models.quantized_weight import ActivationKind, QuantizedWeight
from tiercel.values.errors import ConfigError

Storage = Literal["pack-quantized", "int-quantized", "float-quantized"]
Strategy = Literal["tensor", "channel", "group", "block"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_INTEGERS = (torch.int32, torch.int64)
_STORAGES: tuple[Storage, ...] = ("pack-quantized", "int-quantized", "float-quantized")
_STRATEGIES: tuple[Strategy, ...] = ("tensor", "channel", "group", "block")
_MAX_RULES = 10_000


@dataclass(frozen=True, slots=True)
class ActivationFormat:
    """The rounding of the inputs of a layer. `group`: inputs of a token that share a scale; None: all."""

    kind: ActivationKind
    is_static: bool  # the scale is in the checkpoint
    group: int | None

    @property
    def text(self) -> str:
        """The format in a few words, for people."""
        scales = " with a stored scale" if self.is_static else f" in groups of {self.group}" if self.group else ""
        return f", activations {self.kind}{scales}"


@dataclass(frozen=True, slots=True)
class CompressedFormat:
    """A weight as compressed-tensors stores it. `group_size`: inputs that share a scale, also in a block; -1: all."""

    source: str
    storage: Storage
    bits: int
    strategy: Strategy
    group_size: int
    block_outputs: int
    is_symmetric: bool
    activations: ActivationFormat | None

    @property
    def text(self) -> str:
        """See `LayerFormat.text`."""
        kind = "fp8" if self.storage == "float-quantized" else f"int{self.bits}"
        scales = {
            "tensor": "one scale",
            "channel": "a scale per output",
            "group": text_of_groups(self.group_size),
            "block": f"blocks of {self.block_outputs} x {self.group_size}",
        }[self.strategy]
        zeros = "" if self.is_symmetric else ", zero points"
        return f"{kind}, {scales}{zeros}{'' if self.activations is None else self.activations.text}"

    def _size(self, inputs: int) -> int:
        return inputs if self.group_size == -1 else self.group_size

    def tensors(self, layer: str, outputs: int, inputs: int) -> Mapping[str, StoredTensor]:
        """See `LayerFormat.tensors`."""
        size = group_size_for(layer, inputs, self.group_size, self.source)
        if self.activations is not None and self.activations.group is not None:
            group_size_for(layer, inputs, self.activations.group, f"{self.source}: input_activations")
        columns = inputs // size
        shapes: dict[Strategy, tuple[tuple[int, ...], ...]] = {
            "tensor": ((), (1,), (1, 1)),
            "channel": ((outputs, 1), (outputs,)),
            "group": ((outputs, columns),),
            "block": ((-(-outputs // self.block_outputs), columns),),
        }
        scales = shapes[self.strategy]
        stored = {"scales": StoredTensor(("weight_scale",), _FLOATS, scales)}
        if self.storage == "pack-quantized":
            words = -(-inputs * self.bits // 32)
            stored["weight"] = StoredTensor(("weight_packed",), (torch.int32,), ((outputs, words),))
            stored["shape"] = StoredTensor(("weight_shape",), _INTEGERS, ((2,),), is_optional=True)
        else:
            dtype = torch.float8_e4m3fn if self.storage == "float-quantized" else torch.int8
            stored["weight"] = StoredTensor(("weight",), (dtype,), ((outputs, inputs),))
        if self._has_packed_zeros:
            packed = ((-(-outputs * self.bits // 32), columns),)
            stored["zeros"] = StoredTensor(("weight_zero_point",), (torch.int32,), packed)
        else:  # of symmetric weights, too, in older versions; then they are 0
            kinds = (torch.int8, *_FLOATS, torch.float8_e4m3fn) if self.is_symmetric else (torch.int8,)
            stored["zeros"] = StoredTensor(("weight_zero_point",), kinds, scales, is_optional=self.is_symmetric)
        if self.strategy == "group":
            stored["groups"] = StoredTensor(("weight_g_idx",), _INTEGERS, ((inputs,),), is_optional=True)
        if self.activations is not None and self.activations.is_static:
            stored["input"] = StoredTensor(("input_scale",), _FLOATS, ((), (1,)))
            kinds = (torch.int8, torch.float8_e4m3fn, *_FLOATS)
            stored["input_zero"] = StoredTensor(("input_zero_point",), kinds, ((), (1,)), is_optional=True)
        return stored

    @property
    def _has_packed_zeros(self) -> bool:
        return not self.is_symmetric and self.storage == "pack-quantized" and self.strategy in ("group", "channel")

    def stored_bytes(self, outputs: int, inputs: int) -> int:
        """See `LayerFormat.stored_bytes`."""
        return count_bytes(outputs, inputs, self.bits, self._size(inputs), not self.is_symmetric)

    def read(self, found: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        """See `LayerFormat.read`."""
        if "shape" in found and found["shape"].tolist() != [outputs, inputs]:
            raise WrongTensorError("shape", f"the shape is {found['shape'].tolist()}, not {[outputs, inputs]}")
        for role in ("zeros", "input_zero"):
            must_be_zero = role == "input_zero" or self.is_symmetric
            if role in found and must_be_zero and bool(found[role].float().any()):
                raise WrongTensorError(role, "the scheme is symmetric, and a zero point is not 0")
        size = self._size(inputs)
        scales = self._spread(check_finite("scales", found["scales"]), outputs)
        if self.storage == "float-quantized":
            weight = QuantizedWeight(found["weight"].clone(), scales, None, None, size, 8)
        else:
            weight = self._read_integers(found, scales, size, outputs, inputs)
        if self.activations is None:
            return weight
        scale = read_input_scale("input", found["input"]) if self.activations.is_static else None
        kind, group = self.activations.kind, self.activations.group
        return replace(weight, activations=kind, activation_scale=scale, activation_group=group)

    def _read_integers(
        self, found: Mapping[str, Tensor], scales: Tensor, size: int, outputs: int, inputs: int
    ) -> QuantizedWeight:
        middle = 1 << self.bits - 1
        if self.storage == "pack-quantized":
            integers = split_words(found["weight"], self.bits, inputs)
        else:
            signed = found["weight"]
            if self.bits == 4 and (int(signed.min()) < -8 or int(signed.max()) > 7):
                raise WrongTensorError("weight", "a value of 4 bits is not from -8 to 7")
            integers = (signed.view(torch.uint8) + middle) & ((2 * middle) - 1)
        if self.is_symmetric:
            zeros = torch.full((), middle)
        elif self._has_packed_zeros:
            zeros = split_columns(found["zeros"], self.bits, outputs).t()
        else:
            zeros = self._spread(found["zeros"].to(torch.int32), outputs) + middle
        order = order_of("groups", found["groups"], size) if "groups" in found else None
        if order is not None:
            integers = integers[:, order]
        return affine_weight(integers.contiguous(), zeros, scales, order, size, self.bits)

    def _spread(self, numbers: Tensor, outputs: int) -> Tensor:
        """Return the scales or zero points of each output: [outputs, groups]."""
        if self.strategy == "tensor":
            return numbers.reshape(1, 1).expand(outputs, 1).contiguous()
        if self.strategy == "block":
            return expand_blocks(numbers, self.block_outputs, outputs)
        return numbers.reshape(outputs, -1).contiguous()

    def draw(self, weight: Tensor) -> QuantizedWeight:
        """See `LayerFormat.draw`."""
        size = self._size(weight.shape[1])
        if self.storage == "float-quantized":
            drawn = QuantizedWeight(*quantize_to_fp8(weight, size), None, None, size, 8)
        else:
            drawn = draw_affine(weight, self.bits, size, self.is_symmetric)
        if self.activations is None:
            return drawn
        scale = 1 / 16 if self.activations.is_static else None
        return replace(
            drawn,
            activations=self.activations.kind,
            activation_scale=scale,
            activation_group=self.activations.group,
        )


def read_compressed(fields: ConfigFields) -> tuple[Rule, ...]:
    """Read the rules of `quant_method: compressed-tensors`. Errors: ConfigError naming the field."""
    status = fields.read("quantization_status", str, "compressed").lower()
    if status != "compressed":
        raise ConfigError(UNSUPPORTED, f"{fields.source}: quantization_status: {status} is not supported")
    for name in ("sparsity_config", "transform_config"):
        nested = fields.object(name)
        if nested is not None and nested.names() and nested.raw("format") != "dense":
            raise ConfigError(UNSUPPORTED, f"{fields.source}: {name} is not supported")
    groups = fields.object("config_groups")
    if groups is None or not groups.names():
        raise ConfigError("model.field_missing", f"{fields.source}: config_groups must have a group")
    found: list[tuple[NamePattern, LayerFormat | None]] = []
    for name in groups.names():
        group = groups.object(name)
        if group is None:
            raise ConfigError("model.field_wrong", f"{groups.source}: {name} must be an object")
        form = _read_group(group, fields.raw("format"))
        targets = group.raw("targets")
        if not isinstance(targets, list):
            raise ConfigError("model.field_wrong", f"{group.source}: targets must be a list, not {targets!r:.200}")
        found += [(_class_pattern(read_pattern(text, f"{group.source}: targets")), form) for text in targets]
    if len(found) > _MAX_RULES:
        raise ConfigError("model.field_wrong", f"{groups.source}: more than {_MAX_RULES:,} targets")
    ranks = {"exact": 0, "regex": 1, "part": 2, "class": 3}
    found.sort(key=lambda target: (ranks[target[0].kind], target[0].text))
    ignored = read_patterns(fields.raw("ignore"), f"{fields.source}: ignore")
    kept = tuple(_class_pattern(pattern) for pattern in ignored)
    return Rule(kept, None), *(Rule((pattern,), form) for pattern, form in found)


def _class_pattern(pattern: NamePattern) -> NamePattern:
    is_class = pattern == NamePattern("exact", "Linear")
    return NamePattern("class", "Linear") if is_class else pattern


def _read_group(group: ConfigFields, model_format: object) -> CompressedFormat | None:
    weights = group.object("weights")
    if group.object("output_activations") is not None:
        raise ConfigError(UNSUPPORTED, f"{group.source}: output_activations is not supported")
    activations = group.object("input_activations")
    if weights is None:
        if activations is not None:
            raise ConfigError(UNSUPPORTED, f"{group.source}: input_activations without weights is not supported")
        return None
    kind = weights.choice("type", ("int", "float"), "int")
    storage = _read_storage(group, model_format, kind, has_activations=activations is not None)
    bits = weights.read("num_bits", int, 8)
    if bits not in ((8,) if kind == "float" else (4, 8)):
        raise ConfigError(UNSUPPORTED, f"{weights.source}: num_bits: {bits} is not supported for type {kind}")
    if weights.raw("dynamic") not in (None, False):
        raise ConfigError(UNSUPPORTED, f"{weights.source}: dynamic: {weights.raw('dynamic')!r:.200} is not supported")
    is_symmetric = weights.read("symmetric", bool, True)
    if kind == "float" and not is_symmetric:
        raise ConfigError(UNSUPPORTED, f"{weights.source}: symmetric: false is not supported for type float")
    strategy, size, block_outputs = _read_strategy(weights)
    if block_outputs > 1 and not is_symmetric:
        raise ConfigError(UNSUPPORTED, f"{weights.source}: symmetric: false is not supported for strategy block")
    rounded = None if activations is None else _read_activations(activations)
    return CompressedFormat(weights.source, storage, bits, strategy, size, block_outputs, is_symmetric, rounded)


def _read_storage(group: ConfigFields, model_format: object, kind: str, *, has_activations: bool) -> Storage:
    named = group.raw("format")
    if named is None and model_format != "mixed-precision":
        named = model_format
    integers: Storage = "int-quantized" if has_activations else "pack-quantized"
    if named is None:
        return "float-quantized" if kind == "float" else integers
    if named == "naive-quantized":
        return "float-quantized" if kind == "float" else "int-quantized"
    for storage in _STORAGES:
        if named == storage and (storage == "float-quantized") == (kind == "float"):
            return storage
    raise ConfigError(
        UNSUPPORTED, f"{group.source}: format: {named!r:.200} with weights of type {kind} is not supported"
    )


def _read_strategy(weights: ConfigFields) -> tuple[Strategy, int, int]:
    """Return the strategy, the inputs that share a scale (-1: all), and the outputs that do in blocks."""
    size = read_group_size(weights, -1)
    default: Strategy = "group" if size > 0 else "channel" if weights.has("group_size") else "tensor"
    strategy: Strategy = weights.choice("strategy", _STRATEGIES, default)
    if strategy == "group" and size == -1:
        raise ConfigError("model.field_missing", f"{weights.source}: group_size is missing for strategy group")
    if strategy != "block":
        return strategy, size if strategy == "group" else -1, 1
    block = weights.raw("block_structure")
    if isinstance(block, str):  # of older versions, such as 128x128
        block = [int(side) for side in block.split("x") if side.isascii() and side.isdecimal() and len(side) < 9]
    rows, columns = read_block(block, f"{weights.source}: block_structure")
    return "block", columns, rows


def _read_activations(fields: ConfigFields) -> ActivationFormat:
    kind = fields.choice("type", ("int", "float"), "int")
    if (bits := fields.read("num_bits", int, 8)) != 8:
        raise ConfigError(UNSUPPORTED, f"{fields.source}: num_bits: {bits} is not supported")
    if not fields.read("symmetric", bool, True):
        raise ConfigError(UNSUPPORTED, f"{fields.source}: symmetric: false is not supported")
    is_dynamic = fields.read("dynamic", bool, False)
    size = read_group_size(fields, -1)
    default = "group" if size > 0 else "token" if is_dynamic else "tensor"
    strategy = fields.choice("strategy", ("tensor", "token", "group"), default)
    # One scale for all tokens of a batch would make each token depend on the others.
    is_supported = (not is_dynamic, strategy) in ((True, "tensor"), (False, "token"), (False, "group"))
    if not is_supported or (strategy == "group" and size == -1):
        how = "dynamic" if is_dynamic else "static"
        raise ConfigError(UNSUPPORTED, f"{fields.source}: strategy: {how} {strategy} of {size} is not supported")
    return ActivationFormat("int8" if kind == "int" else "fp8", not is_dynamic, size if strategy == "group" else None)
