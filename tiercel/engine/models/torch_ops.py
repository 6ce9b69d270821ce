"""The operators of a decoder in plain torch."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tiercel.engine.attention.base import Attention
from tiercel.engine.forward.kv_cache import head_dim_of
from tiercel.engine.forward.state import AttentionParams, ForwardState
from tiercel.engine.models.layers import RMSNorm, rms_norm
from tiercel.engine.models.ops import Angles, ExpertParts, LayerParts
from tiercel.engine.models.rope import Rotary, rotate


class TorchOps:
    """Operators in plain torch for any attention backend: the reference implementation, used on the CPU."""

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
        kv_heads, head_dim = kv.shape[2], head_dim_of(kv)
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

    def join_layers(self, layers: Sequence[LayerParts]) -> None:
        """See `Ops.join_layers`."""
        return

    def join_experts(self, experts: Sequence[ExpertParts]) -> None:
        """See `Ops.join_experts`."""
        return

    def quantized_packer(self, device: torch.device) -> None:
        """See `Ops.quantized_packer`."""
        return
