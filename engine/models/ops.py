"""What a decoder computes between its matrix products: in plain torch, or in kernels that read everything once."""

import logging
from importlib.util import find_spec
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tiercel.engine.attention.base import Attention, AttentionParams, ForwardState, PagedReader
from tiercel.engine.models.layers import RMSNorm, rms_norm
from tiercel.engine.models.rope import Rotary, rotate

log = logging.getLogger(__name__)

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


class TorchOps:
    """Plain torch, round any attention backend: the reference, and what runs on the CPU."""

    is_capturable = False

    def __init__(self, attention: Attention) -> None:
        self._attention = attention

    def angles(self, rotary: Rotary, positions: Tensor) -> Angles:
        """See `Ops.angles`."""
        return rotary.angles(positions)

    def add_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Ops.add_norm`."""
        total = x if residual is None else residual + x
        return rms_norm(total, weight, eps), total

    def attend(
        self,
        qkv: Tensor,
        norms: tuple[RMSNorm, RMSNorm] | None,
        angles: Angles,
        kv: Tensor,
        state: ForwardState,
        params: AttentionParams,
    ) -> Tensor:
        """See `Ops.attend`."""
        kv_heads, head_dim = kv.shape[2], kv.shape[3] // 2
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        query, key, value = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
        if norms is not None:
            query, key = norms[0].forward(query), norms[1].forward(key)
        query, key = rotate(query, *angles), rotate(key, *angles)
        return self._attention.attend(query, key, value, kv, state, params)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops.silu_mul`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


def open_ops(device: torch.device, attention: Attention) -> Ops:
    """Kernels on a GPU whose attention backend reads what they have written; plain torch everywhere else."""
    if device.type != "cuda":
        return TorchOps(attention)
    if find_spec("triton") is None or not isinstance(attention, PagedReader):
        log.warning("model ops run without kernels attention=%s", type(attention).__name__)
        return TorchOps(attention)
    # lazy: there is no Triton beside a torch for the CPU
    from tiercel.engine.models.triton_ops import TritonOps

    return TritonOps(attention)
