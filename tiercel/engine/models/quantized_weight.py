"""A weight of 4 or 8 bits in the one form that every checkpoint format is read into."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ActivationKind = Literal["int8", "fp8"]
"""Numbers into which a layer's input is rounded before the product; see `activation_rounding.py`."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """weight[o, order[i]] = scales[o, g] * values[o, i] + offsets[o, g], with g = i // group_size.

    values:           [outputs, inputs] int8 or float8_e4m3fn; with 4 bits, integers of -8 to 7, or 0 to 15 beside
                      offsets
    scales:           [outputs, groups] float32
    offsets:          [outputs, groups] float32; None: all are 0
    order:            [inputs] int64, a permutation that makes groups adjoin; None: they do
    group_size:       inputs that share a scale; the number of inputs: one scale per output
    bits:             4 or 8
    activations:      how the layer's input is rounded; None: not at all
    activation_scale: the scale of the rounded input; None: one is computed for each token
    activation_group: inputs of a token that share such a computed scale; None: all of them
    """

    values: Tensor
    scales: Tensor
    offsets: Tensor | None
    order: Tensor | None
    group_size: int
    bits: int
    activations: ActivationKind | None = None
    activation_scale: float | None = None
    activation_group: int | None = None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight as numbers of `dtype`, computed in float32. Shape: [outputs, inputs]."""
        outputs, inputs = self.values.shape
        groups = self.values.float().view(outputs, -1, self.group_size) * self.scales[:, :, None]
        if self.offsets is not None:
            groups += self.offsets[:, :, None]
        weight = groups.view(outputs, inputs).to(dtype)
        if self.order is None:
            return weight
        sorted_weight = torch.empty_like(weight)
        sorted_weight[:, self.order] = weight
        return sorted_weight
