"""The schemes of weights whose kernels are checked and measured, and random weights of them."""

import torch
from torch import Tensor

from benchmarks.gpu.cases import poisoned, relative_error
from tiercel.engine.models.activation_rounding import quantize_weight, round_activations
from tiercel.engine.models.device_linear import DeviceFacts, DeviceLinear
from tiercel.engine.models.quantized_linear import CompactWeight
from tiercel.engine.models.quantized_weight import QuantizedWeight

SCHEMES = ("int4", "int4_zeros", "int8", "w8a8", "fp8", "fp8_blocks")
SHAPES = ((4096, 4096), (1000, 896), (129, 4864))  # outputs and inputs
ROWS = (1, 16, 17, 200)
_BLOCK = 128


def make_weight(scheme: str, weight: Tensor) -> QuantizedWeight:
    """Return a weight of a scheme near `weight`. Inputs that are no multiple of 128 are one group.

    int4 and int8: groups of 128, of int4_zeros with zero points; w8a8: a scale per output, and activations in int8;
    fp8: the same in float8; fp8_blocks: a scale for 128 outputs and inputs, and activations in groups of 128.
    """
    outputs, inputs = weight.shape
    group = inputs if inputs % _BLOCK else _BLOCK
    wide = weight.float()
    groups = wide.unflatten(1, (-1, group))
    largest = groups.abs().amax(-1)
    match scheme:
        case "int4":
            scales = (largest / 7).half().float().clamp(min=1e-7)
            values = (groups / scales[:, :, None]).round().clamp(-8, 7)
            return QuantizedWeight(values.flatten(1).to(torch.int8), scales, None, None, group, 4)
        case "int4_zeros":
            low = groups.amin(-1)
            scales = ((groups.amax(-1) - low) / 15).half().float().clamp(min=1e-7)
            zeros = (-low / scales).round().clamp(0, 15)
            values = (groups / scales[:, :, None] + zeros[:, :, None]).round().clamp(0, 15)
            return QuantizedWeight(values.flatten(1).to(torch.int8), scales, -scales * zeros, None, group, 4)
        case "int8":
            scales = (largest / 127).clamp(min=1e-7)
            values = (groups / scales[:, :, None]).round()
            return QuantizedWeight(values.flatten(1).to(torch.int8), scales, None, None, group, 8)
        case "w8a8":
            found = quantize_weight(weight, 8)
            return QuantizedWeight(found.values, found.scales, None, None, inputs, 8, "int8")
        case "fp8":
            scales = (wide.abs().amax(1, keepdim=True) / 448).clamp(min=1e-7)
            return QuantizedWeight((wide / scales).to(torch.float8_e4m3fn), scales, None, None, inputs, 8, "fp8")
        case "fp8_blocks":
            whole = torch.nn.functional.pad(largest, (0, 0, 0, -outputs % _BLOCK)).unflatten(0, (-1, _BLOCK)).amax(1)
            scales = (whole / 448).clamp(min=1e-7).repeat_interleave(_BLOCK, 0)[:outputs].contiguous()
            values = (groups / scales[:, :, None]).flatten(1).to(torch.float8_e4m3fn)
            return QuantizedWeight(values, scales, None, None, group, 8, "fp8", activation_group=group)
        case _:
            raise ValueError(f"no scheme {scheme}")


def open_product(weight: QuantizedWeight, device: torch.device, facts: DeviceFacts | None = None) -> DeviceLinear:
    """Return the weight in a device's memory. Errors: ValueError if no kernel takes it."""
    found = DeviceLinear.pack(CompactWeight.of(weight).to(device), None, facts or DeviceFacts.of(device))
    if found is None:
        raise ValueError(f"no kernel takes this weight of {tuple(weight.values.shape)}")
    return found


def product_error(
    scheme: str,
    dtype: torch.dtype,
    device: torch.device,
    shapes: tuple[tuple[int, int], ...] = SHAPES,
    rows: tuple[int, ...] = ROWS,
) -> float:
    """Return the largest relative error of a row against the dequantised weight in float32, for several shapes."""
    worst = 0.0
    for outputs, inputs in shapes:
        draw = torch.Generator().manual_seed(outputs + inputs)
        weight = make_weight(scheme, torch.randn(outputs, inputs, generator=draw) / 64)
        layer, dense = open_product(weight, device), weight.dequantize().to(device)
        for count in rows:
            x = torch.randn(count, inputs, generator=draw).to(dtype).to(device)
            wide = x.float()
            if weight.activations is not None:
                wide = round_activations(x, weight.activations, weight.activation_scale, weight.activation_group)
            with poisoned():
                out = layer.forward(x)
            worst = max(worst, relative_error(out, (wide.double() @ dense.double().T).float()))
    return worst
