"""Rotary position embedding.

Source: RoFormer (arXiv 2104.09864); YaRN (arXiv 2309.00071); frequencies as transformers computes them.
"""

import math

import torch
from torch import Tensor

from tiercel.engine.models.config import RopeConfig


class Rotary:
    """Computes cosines and sines of positions in float32, as transformers does.

    Shapes: frequencies [head_dim / 2] float32, radians per position.
    """

    def __init__(self, config: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.frequencies = rope_frequencies(config, head_dim).to(device)
        self.scale = config.attention_factor
        self.dtype = dtype

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines. Shapes: positions [T] int64; returns two [T, 1, head_dim], in the model's dtype."""
        angles = positions[:, None].float() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
        return (angles.cos() * self.scale).to(self.dtype), (angles.sin() * self.scale).to(self.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every head's vector by its position. Shapes: x [T, heads, head_dim]; cos, sin [T, 1, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rope_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Return radians per position for each pair of dimensions. Shapes: returns [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / config.theta**exponents
    match config.kind:
        case "default":
            return frequencies
        case "linear":
            return frequencies / config.factor
        case "llama3":
            return _llama3(frequencies, config)
        case "yarn":
            return _yarn(frequencies, config.theta**exponents, config, head_dim)


def _llama3(frequencies: Tensor, config: RopeConfig) -> Tensor:
    original, low, high = config.original_max_position, config.low_freq_factor, config.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    is_long, is_short = wavelengths > original / low, wavelengths < original / high
    slowed = torch.where(is_long, frequencies / config.factor, frequencies)
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * slowed / config.factor + blend * slowed
    return torch.where(~is_long & ~is_short, blended, slowed)


def _yarn(frequencies: Tensor, periods: Tensor, config: RopeConfig, head_dim: int) -> Tensor:
    def dimension(rotations: float) -> float:
        turns = config.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return (1.0 / (config.factor * periods)) * (1 - keep) + frequencies * keep
