"""All layers of a decoder in one native call, so that a step does not wait for Python between kernels."""

from collections.abc import Callable, Sequence
from ctypes import Array, addressof, byref, pointer
from itertools import accumulate

import torch
from torch import Tensor

from tiercel.engine.attention.native import NativeAttention, describe_layer, sinks_of
from tiercel.engine.forward.kv_cache import head_dim_of, is_quantized, split_cache
from tiercel.engine.forward.state import ForwardState
from tiercel.engine.models.ops import Angles, LayerParts
from tiercel.engine.native.library import NativeLibrary
from tiercel.engine.native.linear import PackedLinear
from tiercel.engine.native.table import CACHE_TYPE_BY_DTYPE, TYPE_BY_DTYPE, HeadsPlan, LayersRun, LayerWeights

_ALIGNMENT = 64  # numbers
_MLP_ROWS = 512  # tokens whose wide activations are in memory at once: about 10 MB in a model of 0.5 B parameters


class NativeLayers:
    """The layers of a decoder whose weights are packed for the native kernels; implements `LayerRunner`.

    One forward runs at a time.
    """

    def __init__(
        self,
        library: NativeLibrary,
        run_layers: Callable[..., None],
        attention: NativeAttention,
        layers: Sequence[LayerParts],
        packed: Sequence[tuple[PackedLinear, PackedLinear, PackedLinear, PackedLinear]],
    ) -> None:
        """`packed`: of each layer the weights of qkv, output, gate_up and down."""
        self._table = library.table
        self._run_layers = run_layers
        self._attention = attention
        self._layers = layers  # with the tensors that `_weights` points to
        self._packed = packed
        # One weight of each kind, with whether it belongs to the MLP: all of a kind need the same memory.
        self._kinds = {
            (place > 1, one.room_kind): (place > 1, one) for four in packed for place, one in enumerate(four)
        }.values()
        self._sinks = [sinks_of(layer.attention.params) for layer in layers]
        self._weights: Array[LayerWeights] = (LayerWeights * len(layers))(
            *(_describe_weights(layer, *four) for layer, four in zip(layers, packed, strict=True))
        )
        # What the attention of the layers is described for.
        self._kv, self._dtype = torch.empty(0), torch.float32
        self._first_layer = self._kv
        self._layer_bytes = 0
        self._kv_width = 0  # keys of a token

    @staticmethod
    def join(library: NativeLibrary, attention: NativeAttention, layers: Sequence[LayerParts]) -> "NativeLayers | None":
        """Return the layers as one; None if a weight is not packed for the native kernels."""
        packed: list[tuple[PackedLinear, PackedLinear, PackedLinear, PackedLinear]] = []
        for layer in layers:
            qkv, output = layer.attention.qkv.native, layer.attention.output.native
            gate_up, down = layer.gate_up.native, layer.down.native
            if qkv is None or output is None or gate_up is None or down is None:
                return None
            packed.append((qkv, output, gate_up, down))
        return (
            None if library.run_layers is None else NativeLayers(library, library.run_layers, attention, layers, packed)
        )

    def forward(self, x: Tensor, angles: Angles, kv: Tensor, state: ForwardState) -> tuple[Tensor, Tensor]:
        """See `LayerRunner.forward`."""
        tokens, hidden = x.shape
        if kv is not self._kv or x.dtype is not self._dtype:
            self._describe_attention(x.dtype, kv)
        qkv_layer, _, gate_up_layer, down_layer = self._packed[0]
        width, mlp_rows = qkv_layer.outputs - 2 * self._kv_width, min(tokens, _MLP_ROWS)
        out = torch.empty_like(x)
        sizes = (
            *(tokens * qkv_layer.outputs, tokens * width, tokens * width),
            *(mlp_rows * gate_up_layer.outputs, mlp_rows * down_layer.inputs),
            -(-self._room_bytes(x.dtype, tokens, mlp_rows) // x.element_size()),
        )
        ends = tuple(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
        scratch = torch.empty(ends[-1], dtype=x.dtype)  # one tensor for all, because each takes some time
        first, item_bytes = scratch.data_ptr(), x.element_size()
        plan = plan_heads((tokens, qkv_layer.outputs), x.dtype, angles, self._first_layer, state)
        run = LayersRun(
            heads=pointer(plan),
            step=pointer(self._attention.step_of(state)),
            residual=x.data_ptr(),
            x=out.data_ptr(),
            qkv=first,
            query=first + ends[0] * item_bytes,
            attended=first + ends[1] * item_bytes,
            gate_up=first + ends[2] * item_bytes,
            activated=first + ends[3] * item_bytes,
            room=first + ends[4] * item_bytes,
            mlp_rows=mlp_rows,
            kv=kv.data_ptr(),
            layer_bytes=self._layer_bytes,
            hidden_size=hidden,
        )
        self._run_layers(byref(self._table), addressof(self._weights), len(self._weights), byref(run))
        return out, x

    def _room_bytes(self, dtype: torch.dtype, tokens: int, mlp_rows: int) -> int:
        """Return the memory that the product with the largest need has beside its operands."""
        return max(one.room_bytes(dtype, mlp_rows if is_mlp else tokens) for is_mlp, one in self._kinds)

    def _describe_attention(self, dtype: torch.dtype, kv: Tensor) -> None:
        """Describe the attention of every layer for this cache, which following forwards may have, too."""
        self._kv, self._dtype, self._first_layer = kv, dtype, kv[:, 0]
        self._layer_bytes = kv.stride(1) * kv.element_size()
        kv_heads, head_dim = kv.shape[3], head_dim_of(kv)
        self._kv_width = kv_heads * head_dim
        heads = self._packed[0][0].outputs // head_dim - 2 * kv_heads
        for weights, layer, sinks in zip(self._weights, self._layers, self._sinks, strict=True):
            weights.attention = describe_layer(heads, dtype, self._first_layer, layer.attention.params, sinks)


def _describe_weights(
    layer: LayerParts, qkv: PackedLinear, output: PackedLinear, gate_up: PackedLinear, down: PackedLinear
) -> LayerWeights:
    norms = layer.attention.norms
    weights = LayerWeights(
        attention_norm=layer.attention_norm.weight.data_ptr(),
        mlp_norm=layer.mlp_norm.weight.data_ptr(),
        attention_eps=layer.attention_norm.eps,
        mlp_eps=layer.mlp_norm.eps,
        qkv=qkv.weights,
        output=output.weights,
        gate_up=gate_up.weights,
        down=down.weights,
    )
    if norms is not None:
        weights.query_norm, weights.key_norm = (norm.weight.data_ptr() for norm in norms)
        weights.query_eps, weights.key_eps = (norm.eps for norm in norms)
    return weights


def plan_heads(
    shape: tuple[int, int], dtype: torch.dtype, angles: Angles, kv: Tensor, state: ForwardState
) -> HeadsPlan:
    """Return the arguments of `store_heads` that all layers of a forward share; they hold addresses of its tensors.

    `shape` and `dtype`: of qkv. Shapes: kv: one layer of the arena.
    """
    tokens, width = shape
    _, block_size, kv_heads, _ = kv.shape
    head_dim = head_dim_of(kv)
    rows = split_cache(kv).rows if is_quantized(kv) else kv
    cos, sin = angles
    return HeadsPlan(
        *(tokens, width // head_dim - 2 * kv_heads, kv_heads, head_dim, *rows.stride()[:3]),
        *(cos.data_ptr(), sin.data_ptr(), state.slot_ids.data_ptr(), state.slot_offsets.data_ptr()),
        *(TYPE_BY_DTYPE[dtype], CACHE_TYPE_BY_DTYPE[kv.dtype], block_size * kv_heads * 2 * head_dim),
    )
