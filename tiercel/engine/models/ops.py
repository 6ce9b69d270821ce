"""The protocol of the operators between a decoder's matrix products: norms, rotation, attention and activation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tiercel.engine.forward.state import AttentionParams, ForwardState
from tiercel.engine.models.layers import Linear, RMSNorm
from tiercel.engine.models.quantized_parts import QuantizedPacker
from tiercel.engine.models.rope import Rotary

Angles = tuple[Tensor, Tensor]
"""Cosines and sines of a forward's positions, in the layout of the ops that computed them."""


@dataclass(frozen=True, slots=True)
class AttentionParts:
    """The weights and parameters of a layer's attention. `norms`: of queries and keys, if heads have them."""

    qkv: Linear
    output: Linear
    norms: tuple[RMSNorm, RMSNorm] | None
    params: AttentionParams


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The weights and parameters of a decoder's layer, in the order of their use."""

    attention_norm: RMSNorm
    attention: AttentionParts
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear


class ExpertParts(NamedTuple):
    """The layers of an expert of a mixture, before and behind the activation."""

    gate_up: Linear
    down: Linear


class ExpertRunner(Protocol):
    """Computes the experts of a mixture in launches that depend on the number of tokens alone."""

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Return the outputs of the chosen experts for each token.

        Shapes: x [T, hidden], chosen [T, per_token] int64; returns [T, per_token, hidden].
        """
        ...


class LayerRunner(Protocol):
    """Computes all layers of a decoder in one call."""

    def forward(self, x: Tensor, angles: Angles, kv: Tensor, state: ForwardState) -> tuple[Tensor, Tensor]:
        """Return the last layer's output, and the residual to which it is not yet added.

        Shapes:  x [T, hidden], the embeddings; kv: see `Model.forward`; returns two [T, hidden].
        Effects: x may be overwritten; kv is written at the state's slots.
        """
        ...


class Ops(Protocol):
    """Norms, rotation, attention and activation of a forward.

    Sums, norms and products are rounded to the model's dtype where transformers rounds them.
    """

    is_capturable: bool  # launches depend on tokens and rows alone, so that a CUDA graph can hold them

    def angles(self, rotary: Rotary, positions: Tensor) -> Angles:
        """Compute the angles once per forward, for `attend` of every layer. Shapes: positions [T] int64."""
        ...

    def add_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return the root-mean-square norm of x + residual, and the sum.

        Shapes:  x and residual [T, hidden], weight [hidden]; returns two [T, hidden].
        Effects: x and residual may be overwritten; use the returned tensors only.
        """
        ...

    def attend(
        self,
        qkv: Tensor,
        norms: tuple[RMSNorm, RMSNorm] | None,
        angles: Angles,
        kv: Tensor,
        state: ForwardState,
        params: AttentionParams,
    ) -> Tensor:
        """Norm queries and keys if the model does, rotate them, write keys and values to the cache, and attend.

        Shapes:  qkv [T, (heads + 2 * kv_heads) * head_dim], queries first; kv [slots, block_size, kv_heads,
                 width], a strided view of one layer; returns [T, heads, head_dim].
        Effects: kv is written at the state's slots before it is read.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up. Shapes: [T, 2 * inner], gate first -> [T, inner]."""
        ...

    def join_layers(self, layers: Sequence[LayerParts]) -> LayerRunner | None:
        """Return a runner for layers whose weights are loaded and packed; None if each operator has to be called."""
        ...

    def join_experts(self, experts: Sequence[ExpertParts]) -> ExpertRunner | None:
        """Return a runner for experts whose weights are loaded; None if those that are hit are called one by one."""
        ...

    def quantized_packer(self, device: torch.device) -> QuantizedPacker | None:
        """Return what packs the quantised weights on this device for kernels of the ops; None if they have none."""
        ...
