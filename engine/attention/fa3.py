"""FlashAttention-3, the fastest attention of a Hopper GPU, where its package is installed."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise

import torch
from torch import Tensor

from tiercel.engine.attention.base import PagedReader
from tiercel.engine.attention.block import write_rows
from tiercel.engine.forward.state import AttentionParams, ForwardState
from tiercel.errors import ConfigError

PACKAGE = "flash_attn_interface"  # of the wheel flash_attn_3; importing it registers the operator

_MOST_SPLITS = 32
_MOST_SEQUENCES = 992  # for which the operator finds out on the device how many parts each context needs
_SCRATCH_BYTES = 128 * 1024 * 1024  # of the parts of a split step
_TILE_ROWS = 128  # of the kernel: tokens times the heads of a group
_MOST_HEAD_DIM = 256
_MOST_BLOCK_SIZE = 63  # the kernel's smallest tile is 64 keys: blocks of whole tiles are read to their end

Forward = Callable[..., Sequence[Tensor]]
"""The operator `flash_attn_3::fwd`."""


def has_fa3() -> bool:
    """Whether the package is installed; imports nothing."""
    return find_spec(PACKAGE) is not None


def load_fa3() -> Forward:
    """The operator of the package. Errors: ConfigError when it does not load beside this torch."""
    try:
        import_module(PACKAGE)
        return torch.ops.flash_attn_3.fwd
    except (ImportError, OSError, AttributeError, RuntimeError) as exc:
        raise ConfigError("attention.fa3_broken", f"--attention-backend fa3: {PACKAGE} does not load: {exc}") from exc


@dataclass(frozen=True, slots=True)
class Fa3Layout:
    """What the operator wants to know of a step in its own types: made by the first layer, read by the others.

    Shapes: table [S, blocks] int32.
    """

    state: ForwardState
    table: Tensor
    longest: int  # tokens of the longest slice


class Fa3Attention:
    """Writes keys and values in plain torch, and lets the operator read them through strided views of the cache.

    A decode can be held by a CUDA graph: its slices have one token, the width of the table is that of the graph's
    input, and every other length is on the device.
    """

    def __init__(self, forward: Forward, processors: int, spare: PagedReader | None = None) -> None:
        """`processors`: streaming multiprocessors; `spare` does what the operator cannot."""
        self.is_capturable = spare is None or spare.is_capturable
        self._forward = forward
        self._processors = processors
        self._spare = spare
        self._layouts: deque[Fa3Layout] = deque(maxlen=2)  # of the nano-batches of a step

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, state: ForwardState, params: AttentionParams
    ) -> Tensor:
        """See `Attention.attend`. Errors: see `read`."""
        write_rows(key, value, kv, state)
        return self.read(query, kv, state, params)

    def read(self, query: Tensor, kv: Tensor, state: ForwardState, params: AttentionParams) -> Tensor:
        """See `PagedReader.read`. Errors: ConfigError for what the operator cannot do, if there is no spare."""
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
        """What is kept of this step; whoever records a graph comes with a state of its own."""
        for layout in self._layouts:
            if layout.state is state:
                return layout
        starts = state.query_starts
        longest = max(end - start for start, end in pairwise(starts))
        table = state.block_tables.to(torch.int32)
        self._layouts.append(Fa3Layout(state, table, longest))
        return self._layouts[-1]

    def _choose_splits(self, query: Tensor, kv_heads: int, sequences: int, longest: int) -> int:
        """At most so many parts of each context; the operator takes fewer where they are short. Of a crowd it would
        cut every context into just so many, and one is enough there.

        As its own heuristic, it supposes that one sequence alone has to keep the processors busy; beyond that it
        bounds the scratch, T * heads * head_dim floats a part.
        """
        if sequences > _MOST_SEQUENCES:
            return 1
        group = query.shape[1] // kv_heads
        wanted = self._processors // (kv_heads * -(-longest * group // _TILE_ROWS))
        room = _SCRATCH_BYTES // (4 * query.numel())
        return max(1, min(_MOST_SPLITS, wanted, room))


def _find_obstacle(query: Tensor, kv: Tensor, params: AttentionParams) -> str | None:
    """What the operator lacks for this layer, in words."""
    head_dim, block_size = query.shape[2], kv.shape[1]
    if params.sinks is not None:
        return "attention sinks"
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"{str(query.dtype).removeprefix('torch.')}"
    if head_dim > _MOST_HEAD_DIM or head_dim % 8 != 0:
        return f"heads of {head_dim} (multiples of 8 up to {_MOST_HEAD_DIM})"
    if block_size > _MOST_BLOCK_SIZE:
        return f"blocks of {block_size} tokens (--block-size up to {_MOST_BLOCK_SIZE})"
    return None
