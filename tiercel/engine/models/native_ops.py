"""The operators of a decoder as native kernels for the CPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tiercel.engine.attention.base import PagedReader
from tiercel.engine.attention.native import NativeAttention
from tiercel.engine.forward.state import AttentionParams, ForwardState
from tiercel.engine.models.layers import RMSNorm
from tiercel.engine.models.native_layers import NativeLayers, plan_heads
from tiercel.engine.models.ops import Angles, ExpertParts, LayerParts
from tiercel.engine.models.rope import Rotary
from tiercel.engine.native.library import NativeLibrary
from tiercel.engine.native.table import TYPE_BY_DTYPE, HeadsPlan


class NativeOps:
    """One native kernel for each operator. Activations and cache may have different dtypes."""

    is_capturable = False

    def __init__(self, library: NativeLibrary, reader: PagedReader) -> None:
        self._library = library
        self._add_norm = library.add_norm
        self._silu_mul = library.silu_mul
        self._store_heads = library.store_heads
        self._reader = reader
        self._planned: tuple[Angles, ForwardState] | None = None  # a forward, and its plan
        self._plan = HeadsPlan()

    def angles(self, rotary: Rotary, positions: Tensor) -> Angles:
        """See `Ops.angles`. Shapes: returns two [T, head_dim / 2] float32, rounded to the rotary's dtype."""
        cos, sin = rotary.table.rows(positions.numpy())  # without torch: see `LastTokens`
        return torch.from_numpy(cos), torch.from_numpy(sin)

    def add_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Ops.add_norm`. With a residual, x is overwritten with the norm and the residual with the sum."""
        rows, size = x.shape
        at = x.data_ptr()
        if residual is None:
            out = torch.empty_like(x)
            self._add_norm(TYPE_BY_DTYPE[x.dtype], at, None, weight.data_ptr(), out.data_ptr(), rows, size, eps)
            return out, x
        self._add_norm(TYPE_BY_DTYPE[x.dtype], at, residual.data_ptr(), weight.data_ptr(), at, rows, size, eps)
        return x, residual

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
        if self._planned is None or self._planned[0] is not angles or self._planned[1] is not state:
            tokens, width = qkv.shape
            self._plan = plan_heads((tokens, width), qkv.dtype, angles, kv, state)
            self._planned = angles, state
        plan = self._plan
        query = torch.empty((plan.tokens, plan.heads, plan.head_dim), dtype=qkv.dtype)
        if norms is None:
            query_weight, key_weight, query_eps, key_eps = None, None, 0.0, 0.0
        else:
            query_weight, key_weight = norms[0].weight.data_ptr(), norms[1].weight.data_ptr()
            query_eps, key_eps = norms[0].eps, norms[1].eps
        self._store_heads(
            *(plan, qkv.data_ptr(), query_weight, key_weight, query_eps, key_eps, query.data_ptr(), kv.data_ptr())
        )
        return self._reader.read(query, kv, state, params)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops.silu_mul`."""
        rows, width = gate_up.shape
        out = torch.empty((rows, width // 2), dtype=gate_up.dtype)
        self._silu_mul(TYPE_BY_DTYPE[gate_up.dtype], gate_up.data_ptr(), out.data_ptr(), rows, width // 2)
        return out

    def join_layers(self, layers: Sequence[LayerParts]) -> NativeLayers | None:
        """See `Ops.join_layers`. None unless attention is native and all weights are packed for the kernels."""
        if not isinstance(self._reader, NativeAttention):
            return None
        return NativeLayers.join(self._library, self._reader, layers)

    def join_experts(self, experts: Sequence[ExpertParts]) -> None:
        """See `Ops.join_experts`."""
        return

    def quantized_packer(self, device: torch.device) -> None:
        """See `Ops.quantized_packer`."""
        return
