"""The operators between a decoder's matrix products: norms, rotation, attention and activation."""

from typing import Protocol

from torch import Tensor

from tiercel.engine.forward.state import AttentionParams, ForwardState
from tiercel.engine.models.layers import RMSNorm
from tiercel.engine.models.rope import Rotary

Angles = tuple[Tensor, Tensor]
"""Cosines and sines of a forward's positions, laid out as the ops that made them want them."""


class Ops(Protocol):
    """Norms, rotation, attention and activation of one forward, each as the device does it best.

    A sum, a norm and a product are rounded to the model's dtype where transformers rounds them.
    """

    is_capturable: bool  # a decode launches the same kernels whatever the lengths: a CUDA graph can hold it

    def angles(self, rotary: Rotary, positions: Tensor) -> Angles:
        """Computed once a forward, for `attend` of every layer. Shapes: positions [T] int64."""
        ...

    def add_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The root-mean-square norm of x + residual, and that sum.

        Shapes:  x and residual [T, hidden], weight [hidden]; returns two [T, hidden].
        Effects: what was given may be overwritten: only what is returned counts afterwards.
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
        """Norms of queries and keys where the model has them, rotation, the cache, attention.

        Shapes:  qkv [T, (heads + 2 * kv_heads) * head_dim], queries first; kv [slots, block_size, kv_heads,
                 2 * head_dim], a strided view of one layer; returns [T, heads, head_dim].
        Effects: kv is written at the state's slots before it is read.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up. Shapes: [T, 2 * inner], gate first -> [T, inner]."""
        ...
