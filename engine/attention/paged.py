"""The portable backend of a GPU: our own paged kernels in Triton."""

from itertools import pairwise

from torch import Tensor

from tiercel.engine.forward.state import AttentionParams, ForwardState
from tiercel.engine.kernels.paged_decode import attend_singles
from tiercel.engine.kernels.paged_partition import Partition, partition_contexts
from tiercel.engine.kernels.paged_prefill import attend_slices
from tiercel.engine.kernels.paged_store import store_rows
from tiercel.engine.kernels.tiles import DECODE_TILES, Tile, choose_shares, choose_tile


class TritonAttention:
    """Slices of one token through the decode kernel, longer ones through the prefill kernel.

    A step that mixes them launches both. A query of one token fills a few rows of the tile that a prompt needs, and
    one program would walk its whole context alone; the decode kernel packs it into the smallest tile, and all contexts
    of the step are cut into parts of one size. Each kernel leaves the other's slices at once.

    What is found out about a step is kept by its state, and by that alone: whatever changes the lengths on the device,
    or records a graph, comes with another state.
    """

    is_capturable = True

    def __init__(self, processors: int, prefill_tile: Tile | None = None, decode_tile: Tile | None = None) -> None:
        """`processors`: streaming multiprocessors; the tiles are those of the table unless others are tried."""
        self._processors = processors
        self._prefill_tile = prefill_tile
        self._decode_tile = decode_tile
        self._state: ForwardState | None = None  # the step that was seen last, whether it decodes too, and its shares
        self._has_singles = False
        self._partition_by_kind: dict[tuple[int | None, int, Tile], Partition] = {}  # window, shares, tile
        self._kinds: set[tuple[object, ...]] = set()  # of layers whose decode is compiled

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, state: ForwardState, params: AttentionParams
    ) -> Tensor:
        """See `Attention.attend`."""
        store_rows(key, value, kv, state)
        return self.read(query, kv, state, params)

    def read(self, query: Tensor, kv: Tensor, state: ForwardState, params: AttentionParams) -> Tensor:
        """See `PagedReader.read`."""
        out = query.new_empty(query.shape)
        # At the first sight of a kind of layer its decode is run in any case, as no later step may wait for a
        # compiler: there is one of each kernel whatever the step, and longer slices are left at once.
        kind = (query.shape[1:], params.window, params.softcap is None, params.sinks is None)
        if self._mixes_singles(state) or kind not in self._kinds:
            self._kinds.add(kind)
            attend_singles(query, kv, state, params, out, self._partition(query, kv.shape[2], state, params.window))
        if not state.is_decode:
            attend_slices(query, kv, state, params, out, 2, self._prefill_tile)
        return out

    def _mixes_singles(self, state: ForwardState) -> bool:
        """Whether any slice has one token; found by the first layer, kept for the others."""
        if self._state is not state:
            self._state = state
            self._has_singles = any(end - start == 1 for start, end in pairwise(state.query_starts))
            self._partition_by_kind = {}
        return self._has_singles

    def _partition(self, query: Tensor, kv_heads: int, state: ForwardState, window: int | None) -> Partition:
        """Of the step that was seen last; made by the first layer of a window, kept for the others."""
        tile = self._decode_tile or choose_tile(DECODE_TILES, query.shape[2], query.dtype)
        kind = (window, choose_shares(kv_heads, self._processors), tile)
        if kind not in self._partition_by_kind:
            self._partition_by_kind[kind] = partition_contexts(state, *kind)
        return self._partition_by_kind[kind]
