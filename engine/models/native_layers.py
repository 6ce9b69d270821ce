"""All layers of a decoder in one native call, so that a step does not wait for Python between kernels."""

from collections.abc import Callable, Sequence
from ctypes import Array, addressof, byref, pointer

import torch
from torch import Tensor

from tiercel.engine.attention.native import NativeAttention, describe_layer
from tiercel.engine.forward.state import ForwardState
from tiercel.engine.models.ops import Angles, LayerParts
from tiercel.engine.native.library import NativeLibrary
from tiercel.engine.native.linear import PackedLinear
from tiercel.engine.native.table import TYPE_BY_DTYPE, HeadsPlan, LayersRun, LayerWeights

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
        self._weights: Array[LayerWeights] = (LayerWeights * len(layers))(
            *(_describe_weights(layer, *four) for layer, four in zip(layers, packed, strict=True))
        )
        self._cache: tuple[object, ...] = ()  # what the attention of the layers is described for

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
        kv_heads, head_dim = kv.shape[3], kv.shape[4] // 2
        qkv_layer, _, gate_up_layer, down_layer = self._packed[0]
        width, mlp_rows = qkv_layer.outputs - 2 * kv_heads * head_dim, min(tokens, _MLP_ROWS)
        self._describe_attention(width // head_dim, x.dtype, kv)
        qkv, query, attended, out = (
            torch.empty((tokens, size), dtype=x.dtype) for size in (qkv_layer.outputs, width, width, hidden)
        )
        gate_up, activated = (
            torch.empty((mlp_rows, size), dtype=x.dtype) for size in (gate_up_layer.outputs, down_layer.inputs)
        )
        plan = plan_heads(qkv, angles, kv[:, 0], state)
        run = LayersRun(
            heads=pointer(plan),
            step=pointer(self._attention.step_of(state)),
            residual=x.data_ptr(),
            x=out.data_ptr(),
            qkv=qkv.data_ptr(),
            query=query.data_ptr(),
            attended=attended.data_ptr(),
            gate_up=gate_up.data_ptr(),
            activated=activated.data_ptr(),
            mlp_rows=mlp_rows,
            kv=kv.data_ptr(),
            layer_bytes=kv.stride(1) * kv.element_size(),
            hidden_size=hidden,
        )
        self._run_layers(byref(self._table), addressof(self._weights), len(self._weights), byref(run))
        return out, x

    def _describe_attention(self, heads: int, dtype: torch.dtype, kv: Tensor) -> None:
        """Describe the attention of every layer for this cache, unless the last forward had one like it."""
        cache = (heads, dtype, kv.dtype, kv.shape[2:], kv.stride())
        if cache != self._cache:
            for weights, layer in zip(self._weights, self._layers, strict=True):
                weights.attention = describe_layer(heads, dtype, kv[:, 0], layer.attention.params)
            self._cache = cache


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


def plan_heads(qkv: Tensor, angles: Angles, kv: Tensor, state: ForwardState) -> HeadsPlan:
    """Return the arguments of `store_heads` that all layers of a forward share; they hold addresses of its tensors."""
    tokens, width = qkv.shape
    kv_heads, head_dim = kv.shape[2], kv.shape[3] // 2
    cos, sin = angles
    return HeadsPlan(
        *(tokens, width // head_dim - 2 * kv_heads, kv_heads, head_dim, *kv.stride()[:3]),
        *(cos.data_ptr(), sin.data_ptr(), state.slot_ids.data_ptr(), state.slot_offsets.data_ptr()),
        *(TYPE_BY_DTYPE[qkv.dtype], TYPE_BY_DTYPE[kv.dtype]),
    )
