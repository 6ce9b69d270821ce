"""The rounding of a layer's input to 8 bits, and of weights that are quantised at load."""

import torch
from torch import Tensor

from tiercel.engine.models.quantized_weight import ActivationKind, QuantizedWeight

FP8_MAX = 448.0
_LARGEST = {"int8": 127.0, "fp8": FP8_MAX}
_LEAST_TOKEN_SCALE = 1 / (FP8_MAX * 512)  # of fp8, as in vLLM
_LEAST_GROUP_MAXIMUM = 1e-10  # of fp8 with several scales per token, as in vLLM
_FLOAT16_MAX = 65504.0
_GROUP = 32  # inputs that share a scale in weights of 4 bits
_PIECE = 1 << 16  # weights that are in memory in float32 at once


def round_activations(x: Tensor, kind: ActivationKind, scale: float | None = None, group: int | None = None) -> Tensor:
    """Return the inputs after rounding, in units of x. Shapes: x [T, inputs] -> same, float32.

    int8: x / s rounded to the nearest integer, halves to the even one, from -128 to 127; fp8: x / s rounded to
    float8_e4m3fn, at most 448. Everything is computed in float32. The scale s is `scale` or, for each token or each
    `group` inputs of a token, the largest magnitude over 127 or 448; a token of zeros stays one.

    vLLM rounds so. (The compressed-tensors package simulates int8 with 127.5 instead of 127.)
    """
    wide = x.float()
    pieces = wide.unflatten(-1, (-1, group or wide.shape[-1]))
    if scale is not None:
        scales = torch.full((), scale, dtype=torch.float32, device=x.device)
    else:
        largest = pieces.abs().amax(-1, keepdim=True)
        if kind == "fp8" and group is not None:
            largest = largest.clamp(min=_LEAST_GROUP_MAXIMUM)
        scales = largest / _LARGEST[kind]
        if kind == "int8":
            scales = scales.masked_fill(scales == 0, 1)
        elif group is None:
            scales = scales.clamp(min=_LEAST_TOKEN_SCALE)
    rounded = pieces / scales
    if kind == "int8":
        rounded = rounded.round().clamp(-128, 127)
    else:
        rounded = rounded.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()
    return (rounded * scales).view(wide.shape)


def quantize_weight(weight: Tensor, bits: int) -> QuantizedWeight:
    """Return a weight rounded to the nearest values of 4 or 8 bits; activations stay as they are.

    8 bits: one scale per output, the largest magnitude over 127. 4 bits: groups of 32 inputs, whose scale maps the
    number of the largest magnitude to -8, as llama.cpp's Q4_0 does; where the inputs are no multiple of 32, 8 bits.
    Scales of 4 bits are rounded to float16 before values are computed with them.

    Shapes: weight [outputs, inputs] of any floating-point type.
    Cost:   beside the result, the memory of some megabytes of weights in float32.
    """
    outputs, inputs = weight.shape
    is_narrow = bits == 4 and inputs % _GROUP == 0
    group_size = _GROUP if is_narrow else inputs
    values = torch.empty(outputs, inputs, dtype=torch.int8, device=weight.device)
    scales = torch.empty(outputs, inputs // group_size, dtype=torch.float32, device=weight.device)
    rows = max(1, _PIECE // inputs)
    for start in range(0, outputs, rows):
        piece = slice(start, start + rows)
        groups = weight[piece].float().unflatten(1, (-1, group_size))
        if is_narrow:
            steps = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8
            steps = steps.clamp(-_FLOAT16_MAX, _FLOAT16_MAX).half().float()
        else:
            steps = groups.abs().amax(-1, keepdim=True) / 127
        steps = steps.masked_fill(steps == 0, 1)
        low, high = (-8, 7) if is_narrow else (-127, 127)
        values[piece] = (groups / steps).round_().clamp_(low, high).flatten(1).to(torch.int8)
        scales[piece] = steps.squeeze(-1)
    return QuantizedWeight(values, scales, None, None, group_size, 4 if is_narrow else 8)
