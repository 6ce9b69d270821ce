"""Rotary position embedding.

Source: RoFormer (arXiv 2104.09864); YaRN (arXiv 2309.00071); frequencies as transformers computes them.
"""

import math
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiercel.engine.models.config import RopeConfig

_MIN_POSITIONS = 1024  # of a table of angles


class Rotary:
    """Computes cosines and sines of positions in float32, as transformers does.

    Shapes: frequencies [head_dim / 2] float32, radians per position.
    """

    def __init__(self, config: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.frequencies = rope_frequencies(config, head_dim).to(device)
        self.scale = config.attention_factor
        self.dtype = dtype

    @cached_property
    def table(self) -> "AngleTable":
        """The angles in host memory, for kernels of the CPU."""
        return AngleTable(self)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines. Shapes: positions [T] int64; returns two [T, 1, head_dim], in the model's dtype."""
        angles = positions[:, None].float() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
        return (angles.cos() * self.scale).to(self.dtype), (angles.sin() * self.scale).to(self.dtype)


class AngleTable:
    """The angles of all positions so far in host memory, from which a forward copies its rows.

    Shapes: cosines and sines [positions, head_dim / 2] float32, rounded to the rotary's dtype.
    Cost:   computed when a position is first seen, for at least twice as many positions as before.
    """

    def __init__(self, rotary: Rotary) -> None:
        self._rotary = rotary
        self._cos = self._sin = np.empty((0, len(rotary.frequencies)), np.float32)

    def rows(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return cosines and sines. Shapes: positions [T]; returns two [T, head_dim / 2]."""
        count = int(positions.max(initial=0)) + 1
        if count > len(self._cos):
            self._grow(max(_MIN_POSITIONS, 1 << (count - 1).bit_length()))
        return self._cos[positions], self._sin[positions]

    def _grow(self, count: int) -> None:
        rotary = self._rotary
        angles = torch.arange(count)[:, None].float() * rotary.frequencies
        cos, sin = angles.cos() * rotary.scale, angles.sin() * rotary.scale
        self._cos, self._sin = (part.to(rotary.dtype).float().numpy() for part in (cos, sin))


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
