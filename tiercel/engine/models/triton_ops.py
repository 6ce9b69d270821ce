"""The operators of a decoder as Triton kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tiercel.engine.attention.base import PagedReader
from tiercel.engine.forward.state import AttentionParams, ForwardState
from tiercel.engine.kernels.activation import silu_mul
from tiercel.engine.kernels.experts import GroupedExperts
from tiercel.engine.kernels.norm import add_norm
from tiercel.engine.kernels.rotary import position_angles, store_heads
from tiercel.engine.models.device_linear import DeviceFacts, DeviceLinear
from tiercel.engine.models.layers import RMSNorm
from tiercel.engine.models.ops import Angles, ExpertParts, LayerParts
from tiercel.engine.models.quantized_parts import QuantizedPacker
from tiercel.engine.models.rope import Rotary


class TritonOps:
    """One kernel for each operator, for a backend that reads keys and values that a kernel has written."""

    def __init__(self, reader: PagedReader) -> None:
        self.is_capturable = reader.is_capturable
        self._reader = reader

    def angles(self, rotary: Rotary, positions: Tensor) -> Angles:
        """See `Ops.angles`. Shapes: returns two [T, head_dim / 2]; both halves of a head have the same angles."""
        return position_angles(positions, rotary.frequencies, rotary.scale, rotary.dtype)

    def add_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Ops.add_norm`."""
        return add_norm(x, residual, weight, eps)

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
        pair = None if norms is None else ((norms[0].weight, norms[0].eps), (norms[1].weight, norms[1].eps))
        query = store_heads(qkv, pair, angles, kv, state)
        return self._reader.read(query, kv, state, params)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops.silu_mul`."""
        return silu_mul(gate_up)

    def join_layers(self, layers: Sequence[LayerParts]) -> None:
        """See `Ops.join_layers`."""
        return

    def join_experts(self, experts: Sequence[ExpertParts]) -> GroupedExperts:
        """See `Ops.join_experts`."""
        return GroupedExperts([one.gate_up.weight for one in experts], [one.down.weight for one in experts])

    def quantized_packer(self, device: torch.device) -> QuantizedPacker:
        """See `Ops.quantized_packer`. Waits for the device."""
        facts = DeviceFacts.of(device)
        return QuantizedPacker(lambda weight, bias: DeviceLinear.pack(weight, bias, facts))
