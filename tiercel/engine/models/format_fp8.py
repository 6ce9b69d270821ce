"""Weights in 8-bit floats (`quant_method: fp8`): one scale, one per output, or one per block of outputs and inputs.

Layout: transformers' FineGrainedFP8Config and vLLM's Fp8Config.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.engine.models.activation_rounding import FP8_MAX
from tiercel.engine.models.config import ConfigFields
from tiercel.engine.models.quantization import (
    NamePattern,
    Rule,
    StoredTensor,
    WrongTensorError,
    check_finite,
    count_bytes,
    group_size_for,
    read_block,
    read_patterns,
)
from tiercel.engine.models.quantized_weight import QuantizedWeight
from tiercel.values.errors import ConfigError

_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """A weight in float8_e4m3fn. `block`: outputs and inputs that share a scale; None: one scale, or one per output."""

    source: str
    block: tuple[int, int] | None
    is_static: bool  # the scale of the inputs is in the checkpoint

    @property
    def text(self) -> str:
        """See `LayerFormat.text`."""
        scales = "one scale or one per output" if self.block is None else f"blocks of {self.block[0]} x {self.block[1]}"
        return f"fp8, {scales}, activations fp8{' with a stored scale' if self.is_static else ''}"

    def tensors(self, layer: str, outputs: int, inputs: int) -> Mapping[str, StoredTensor]:
        """See `LayerFormat.tensors`."""
        stored = {"weight": StoredTensor(("weight",), (torch.float8_e4m3fn,), ((outputs, inputs),))}
        if self.block is None:
            shapes: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (outputs,), (outputs, 1))
        else:
            group_size_for(layer, inputs, self.block[1], self.source)
            shapes = ((-(-outputs // self.block[0]), inputs // self.block[1]),)
        stored["scales"] = StoredTensor(("weight_scale_inv", "weight_scale"), _SCALES, shapes)
        names = ("input_scale", "activation_scale")
        stored["input"] = StoredTensor(names, _SCALES, ((), (1,)), is_optional=not self.is_static)
        return stored

    def stored_bytes(self, outputs: int, inputs: int) -> int:
        """See `LayerFormat.stored_bytes`."""
        return count_bytes(outputs, inputs, 8, inputs if self.block is None else self.block[1])

    def read(self, found: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        """See `LayerFormat.read`."""
        scales = check_finite("scales", found["scales"])
        if self.block is None:
            return fp8_weight(
                found["weight"].clone(), scales.reshape(-1, 1).expand(outputs, 1), inputs, self.scale_of(found)
            )
        wide = expand_blocks(scales, self.block[0], outputs)
        return fp8_weight(found["weight"].clone(), wide, self.block[1], None, self.block[1])

    def scale_of(self, found: Mapping[str, Tensor]) -> float | None:
        """Return the stored scale of the inputs, if it is used. Errors: WrongTensorError."""
        return read_input_scale("input", found["input"]) if self.is_static else None

    def draw(self, weight: Tensor) -> QuantizedWeight:
        """See `LayerFormat.draw`."""
        if self.block is None:
            values, scales = quantize_to_fp8(weight, weight.shape[1])
            return fp8_weight(values, scales, weight.shape[1], 1 / 64 if self.is_static else None)
        values, scales = quantize_to_fp8(weight, self.block[1])
        return fp8_weight(values, scales, self.block[1], None, self.block[1])


def fp8_weight(
    values: Tensor, scales: Tensor, group_size: int, activation_scale: float | None, activation_group: int | None = None
) -> QuantizedWeight:
    """Return a weight whose inputs are rounded to fp8."""
    return QuantizedWeight(
        values, scales.contiguous(), None, None, group_size, 8, "fp8", activation_scale, activation_group
    )


def expand_blocks(scales: Tensor, block_outputs: int, outputs: int) -> Tensor:
    """Return the scales of each output. Shapes: [blocks of outputs, groups of inputs] -> [outputs, groups]."""
    return scales.repeat_interleave(block_outputs, 0)[:outputs]


def quantize_to_fp8(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Return values in float8_e4m3fn, and a scale for each group. Shapes: [outputs, inputs], [outputs, groups]."""
    groups = weight.float().unflatten(1, (-1, group_size))
    scales = groups.abs().amax(-1, keepdim=True) / FP8_MAX
    scales.masked_fill_(scales == 0, 1)
    values = (groups / scales).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return values.flatten(1), scales.squeeze(-1)


def read_input_scale(role: str, tensor: Tensor) -> float:
    """Return the scale of a layer's inputs. Errors: WrongTensorError if it is not a finite number above 0."""
    scale = float(tensor.float().reshape(()))
    if not 0 < scale < float("inf"):
        raise WrongTensorError(role, f"the scale of the inputs is {scale}, not above 0")
    return scale


def read_fp8(fields: ConfigFields) -> tuple[Rule, ...]:
    """Read the rules of `quant_method: fp8`. Errors: ConfigError naming the field."""
    activations = fields.choice("activation_scheme", ("dynamic", "static"), "dynamic")
    fields.choice("fmt", ("e4m3", "e4m3fn", "float8_e4m3fn"), "e4m3")
    fields.choice("expert_dtype", ("fp8",), "fp8")
    block = None
    if fields.has("weight_block_size"):
        block = read_block(fields.raw("weight_block_size"), f"{fields.source}: weight_block_size")
        if activations == "static":
            raise ConfigError(
                "model.field_wrong", f"{fields.source}: activation_scheme: static does not go with weight_block_size"
            )
    skipped = tuple(
        pattern
        for name in ("modules_to_not_convert", "ignored_layers")
        for pattern in read_patterns(fields.raw(name), f"{fields.source}: {name}", "part")
    )
    form = Fp8Format(fields.source, block, activations == "static")
    # Without a list the head stays as it is, as in transformers.
    kept = skipped or (NamePattern("exact", "lm_head"),)
    return Rule(kept, None), Rule((NamePattern("class", ""),), form)
