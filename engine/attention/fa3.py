"""FlashAttention-3, the fastest attention on a Hopper GPU, if its package is installed."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise

import torch
from torch import Tensor

from tiercel.engine.attention.base import PagedReader
from tiercel.engine.attention.cache_rows import write_rows
from tiercel.engine.forward.kv_cache import is_quantized
from tiercel.engine.forward.state import AttentionParams, ForwardState
from tiercel.errors import ConfigError

PACKAGE = "flash_attn_interface"  # of the wheel flash_attn_3; importing it registers the operator

_MAX_SPLITS = 32
_MAX_SEQUENCES = 992  # up to which the operator computes on the device how many parts each context needs
_SCRATCH_BYTES = 128 * 1024 * 1024  # of the parts of a split step
_TILE_ROWS = 128  # of the kernel: tokens times the heads of a group
_MAX_HEAD_DIM = 256
_MAX_BLOCK_SIZE = 63  # the kernel's smallest tile is 64 keys, and blocks of whole tiles are read to their end

Forward = Callable[..., Sequence[Tensor]]
"""The operator `flash_attn_3::fwd`."""


def has_fa3() -> bool:
    """Return whether the package is installed, without importing it."""
    return find_spec(PACKAGE) is not None


def load_fa3() -> Forward:
    """Import the package and return its operator. Errors: ConfigError if it does not load with this torch."""
    try:
        import_module(PACKAGE)
        return torch.ops.flash_attn_3.fwd
    except (ImportError, OSError, AttributeError, RuntimeError) as exc:
        raise ConfigError("attention.fa3_broken", f"--attention-backend fa3: {PACKAGE} does not load: {exc}") from exc


@dataclass(frozen=True, slots=True)
class Fa3Layout:
    """The operator's view of a step, made by the first layer and used by all others.

    Shapes: table [S, blocks] int32.
    """

    state: ForwardState
    table: Tensor
    longest: int  # slice, in tokens


class Fa3Attention:
    """Writes keys and values in plain torch; the operator reads them through strided views of the cache.

    A CUDA graph can hold a decode: its slices have one token, the table has the width of the graph's input, and every
    other length is on the device.
    """

    def __init__(self, forward: Forward, processors: int, spare: PagedReader | None = None) -> None:
        """`processors`: streaming multiprocessors; `spare`: the backend for layers that the operator cannot compute."""
        self.is_capturable = spare is None or spare.is_capturable
        self._forward = forward
        self._processors = processors
        self._spare = spare
        self._layouts: deque[Fa3Layout] = deque(maxlen=2)  # of the last nano-batches

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, state: ForwardState, params: AttentionParams
    ) -> Tensor:
        """See `Attention.attend`. Errors: see `read`."""
        write_rows(key, value, kv, state)
        return self.read(query, kv, state, params)

    def read(self, query: Tensor, kv: Tensor, state: ForwardState, params: AttentionParams) -> Tensor:
        """See `PagedReader.read`. Errors: ConfigError if neither the operator nor a spare can compute the layer."""
        obstacle = _find_obstacle(query, kv, params)
        if obstacle is not None:
            if self._spare is None:
                raise ConfigError("attention.fa3_unable", f"--attention-backend fa3 has no {obstacle}: use triton")
            return self._spare.read(query, kv, state, params)
        head_dim = query.shape[2]
        layout = self._layout(state)
        return self._forward(
            query,
            kv[..., :head_dim],
            kv[..., head_dim:],
            cu_seqlens_q=state.device_query_starts,
            seqused_k=state.device_context_lengths,
            max_seqlen_q=layout.longest,
            page_table=layout.table,
            softmax_scale=params.scale,
            is_causal=True,
            window_size_left=-1 if params.window is None else params.window - 1,
            window_size_right=0,
            softcap=params.softcap or 0.0,
            num_splits=self._choose_splits(query, kv.shape[2], state.num_sequences, layout.longest),
        )[0]

    def _layout(self, state: ForwardState) -> Fa3Layout:
        """Return the layout of this step, cached by its state; the recording of a graph uses a state of its own."""
        for layout in self._layouts:
            if layout.state is state:
                return layout
        starts = state.query_starts
        longest = max(end - start for start, end in pairwise(starts))
        table = state.block_tables.to(torch.int32)
        self._layouts.append(Fa3Layout(state, table, longest))
        return self._layouts[-1]

    def _choose_splits(self, query: Tensor, kv_heads: int, sequences: int, longest: int) -> int:
        """Return the maximum number of parts of each context; the operator uses fewer for short contexts.

        Like the operator's own heuristic, this assumes that a single sequence has to occupy the processors. It also
        limits the scratch memory, which is T * heads * head_dim floats per part. With more than 992 sequences the
        operator would cut every context into exactly this number, so the number is 1.
        """
        if sequences > _MAX_SEQUENCES:
            return 1
        group = query.shape[1] // kv_heads
        wanted = self._processors // (kv_heads * -(-longest * group // _TILE_ROWS))
        fitting = _SCRATCH_BYTES // (4 * query.numel())
        return max(1, min(_MAX_SPLITS, wanted, fitting))


def _find_obstacle(query: Tensor, kv: Tensor, params: AttentionParams) -> str | None:
    """Return in words why the operator cannot compute this layer; None if it can."""
    head_dim, block_size = query.shape[2], kv.shape[1]
    if params.sinks is not None:
        return "attention sinks"
    if is_quantized(kv):
        return "cache of 8 bits (--kv-cache-dtype)"
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"{str(query.dtype).removeprefix('torch.')}"
    if head_dim > _MAX_HEAD_DIM or head_dim % 8 != 0:
        return f"heads of {head_dim} (multiples of 8 up to {_MAX_HEAD_DIM})"
    if block_size > _MAX_BLOCK_SIZE:
        return f"blocks of {block_size} tokens (--block-size up to {_MAX_BLOCK_SIZE})"
    return None
