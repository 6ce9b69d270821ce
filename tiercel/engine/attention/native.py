"""The fast backend for the CPU: one kernel call a layer, straight from the block tables."""

from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.engine.attention.cache_rows import write_rows
from tiercel.engine.forward.kv_cache import head_dim_of, width_of
from tiercel.engine.forward.state import AttentionParams, ForwardState
from tiercel.engine.native.library import NativeLibrary
from tiercel.engine.native.table import CACHE_TYPE_BY_DTYPE, TYPE_BY_DTYPE, AttentionLayer, AttentionStep

_MAX_LAYERS = 256  # kinds of layers that are remembered; a model has one or two


@dataclass(frozen=True, slots=True)
class _StepFacts:
    """A step as the kernel sees it, and the tensors whose memory it points to."""

    state: ForwardState
    table: Tensor
    step: AttentionStep


@dataclass(frozen=True, slots=True)
class _LayerFacts:
    """A kind of layers as the kernel sees it. Holds the parameters, so that their identity is not given away."""

    params: AttentionParams
    sinks: Tensor | None
    layer: AttentionLayer


class NativeAttention:
    """Paged attention in C++ for decodes, slices and steps that mix them. See engine/native/src/attention.h.

    The result of a token depends on its own query, keys and values alone: it is the same, bit for bit, alone and in a
    batch, in a slice of any length, and with any number of threads. Products and softmax are computed in float32,
    except that on a processor with products of bfloat16, bfloat16 queries over a bfloat16 cache are multiplied by
    them, with probabilities rounded to bfloat16. So it is with a cache of 8 bits, whose numbers bfloat16 holds exactly:
    scores are multiplied by the scales of keys, and probabilities by those of values.
    """

    name = "native"
    is_capturable = False

    def __init__(self, library: NativeLibrary) -> None:
        self._attend = library.attend
        self._step: _StepFacts | None = None
        self._layers: dict[tuple[object, ...], _LayerFacts] = {}

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, state: ForwardState, params: AttentionParams
    ) -> Tensor:
        """See `Attention.attend`."""
        write_rows(key, value, kv, state)
        return self.read(query, kv, state, params)

    def read(self, query: Tensor, kv: Tensor, state: ForwardState, params: AttentionParams) -> Tensor:
        """See `PagedReader.read`. The tokens of `query` may be any distance apart; the rest of it must adjoin."""
        step = self.step_of(state)
        heads, head_dim = query.shape[1:]
        if kv.shape[3] != width_of(head_dim, kv.dtype):
            raise ValueError(f"query {tuple(query.shape)} does not fit kv {tuple(kv.shape)}")
        if query.stride()[1:] != (head_dim, 1):
            query = query.contiguous()
        key = (id(params), heads, query.dtype, kv.dtype, kv.shape[1:], kv.stride())
        layer = self._layers.get(key)
        if layer is None:
            if len(self._layers) >= _MAX_LAYERS:
                self._layers.clear()
            sinks = sinks_of(params)
            layer = _LayerFacts(params, sinks, describe_layer(heads, query.dtype, kv, params, sinks))
            self._layers[key] = layer
        out = torch.empty(query.shape, dtype=query.dtype)
        self._attend(byref(step), byref(layer.layer), query.data_ptr(), query.stride(0), kv.data_ptr(), out.data_ptr())
        return out

    def step_of(self, state: ForwardState) -> AttentionStep:
        """Return a step as the kernel sees it; valid until the next step."""
        if self._step is None or self._step.state is not state:
            self._step = _describe_step(state)
        return self._step.step


def _describe_step(state: ForwardState) -> _StepFacts:
    table = state.block_tables.contiguous()
    step = AttentionStep(
        sequences=state.num_sequences,
        query_starts=state.device_query_starts.data_ptr(),
        context_lengths=state.device_context_lengths.data_ptr(),
        tables=table.data_ptr(),
        table_stride=table.shape[1],
    )
    return _StepFacts(state, table, step)


def sinks_of(params: AttentionParams) -> Tensor | None:
    """Return the sinks of a layer as the kernel reads them. Shapes: [heads] float32, adjoining."""
    return None if params.sinks is None else params.sinks.float().contiguous()


def describe_layer(
    heads: int, query_dtype: torch.dtype, kv: Tensor, params: AttentionParams, sinks: Tensor | None
) -> AttentionLayer:
    """Return a kind of layers as the kernel sees it. `sinks`: see `sinks_of`; they must outlive the result.

    Shapes: kv: see `Attention.attend`.
    Errors: ValueError if the rows of a block do not adjoin, or the heads do not fit the cache.
    """
    _, block_size, kv_heads, width = kv.shape
    head_dim = head_dim_of(kv)
    if kv.stride()[1:] != (kv_heads * width, width, 1):
        raise ValueError(f"kv has strides {kv.stride()}: the rows of a block must adjoin")
    if heads % kv_heads or head_dim % 2:
        raise ValueError(f"{heads} query heads do not fit kv {tuple(kv.shape)}")
    return AttentionLayer(
        query_type=TYPE_BY_DTYPE[query_dtype],
        kv_type=CACHE_TYPE_BY_DTYPE[kv.dtype],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        slot_stride=kv.stride(0),
        window=params.window or 0,
        sinks=None if sinks is None else sinks.data_ptr(),
        scale=params.scale,
        softcap=params.softcap or 0.0,
    )
