"""The portable GPU backend: paged attention kernels in Triton."""

from itertools import pairwise

from torch import Tensor

from tiercel.engine.forward.state import AttentionParams, ForwardState
from tiercel.engine.kernels.paged_decode import attend_singles
from tiercel.engine.kernels.paged_partition import Partition, partition_contexts
from tiercel.engine.kernels.paged_prefill import attend_slices, choose_prefill_tile, tile_rows
from tiercel.engine.kernels.paged_slices import SliceTiles, tile_slices
from tiercel.engine.kernels.paged_store import store_rows
from tiercel.engine.kernels.tiles import DECODE_FORM, DECODE_TILES, DecodeForm, Tile, choose_shares, choose_tile


class TritonAttention:
    """Computes slices of one token with the decode kernel and longer slices with the prefill kernel.

    A step that mixes them launches both. In the prefill kernel a query of one token would fill only a few rows of a
    tile, and one program would read its whole context alone. The decode kernel uses the smallest tile and cuts all
    contexts of the step into parts of one size. The decode kernel has no part for longer slices, and the prefill kernel
    no program for slices of one token.

    Facts of a step are cached by its state object: new lengths on the device, or the recording of a graph, come with a
    new state.
    """

    is_capturable = True

    def __init__(
        self,
        processors: int,
        prefill_tile: Tile | None = None,
        decode_tile: Tile | None = None,
        form: DecodeForm = DECODE_FORM,
    ) -> None:
        """`processors`: streaming multiprocessors; tiles are taken from the table unless given."""
        self._processors = processors
        self._prefill_tile = prefill_tile
        self._decode_tile = decode_tile
        self._form = form
        self._state: ForwardState | None = None  # of the last step; the next three fields describe it
        self._has_singles = False
        self._partition_by_kind: dict[tuple[int | None, int, Tile, int], Partition] = {}  # see `_partition`
        self._tiles_by_tokens: dict[int, SliceTiles] = {}
        self._kinds: set[tuple[object, ...]] = set()  # of layers whose decode kernel is compiled

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, state: ForwardState, params: AttentionParams
    ) -> Tensor:
        """See `Attention.attend`."""
        store_rows(key, value, kv, state)
        return self.read(query, kv, state, params)

    def read(self, query: Tensor, kv: Tensor, state: ForwardState, params: AttentionParams) -> Tensor:
        """See `PagedReader.read`."""
        out = query.new_empty(query.shape)
        # The decode kernel runs for the first step of every kind of layer, so that no later step waits for its
        # compilation. There is one compilation for all steps, and the kernel ends at once for longer slices.
        kind = (query.shape[1:], params.window, params.softcap is None, params.sinks is None)
        if self._mixes_singles(state) or kind not in self._kinds:
            self._kinds.add(kind)
            partition = self._partition(query, kv.shape[2], state, params.window)
            attend_singles(query, kv, state, params, out, partition, self._form)
        if not state.is_decode:
            tile = self._prefill_tile or choose_prefill_tile(query, kv)
            tiles = self._slice_tiles(state, tile_rows(tile, query.shape[1] // kv.shape[2])[1])
            attend_slices(query, kv, state, params, out, tile, tiles)
        return out

    def _mixes_singles(self, state: ForwardState) -> bool:
        """Return whether any slice has one token; the first layer computes it for all others."""
        if self._state is not state:
            self._state = state
            self._has_singles = any(end - start == 1 for start, end in pairwise(state.query_starts))
            self._partition_by_kind = {}
            self._tiles_by_tokens = {}
        return self._has_singles

    def _partition(self, query: Tensor, kv_heads: int, state: ForwardState, window: int | None) -> Partition:
        """Return the partition of the step's contexts; the first layer of each window computes it for the others."""
        tile = self._decode_tile or choose_tile(DECODE_TILES, query.shape[2], query.dtype)
        kind = (window, choose_shares(kv_heads, self._processors), tile, kv_heads)
        if kind not in self._partition_by_kind:
            self._partition_by_kind[kind] = partition_contexts(state, *kind)
        return self._partition_by_kind[kind]

    def _slice_tiles(self, state: ForwardState, tokens: int) -> SliceTiles:
        """Return the tiles of the step's longer slices; the first layer computes them for the others."""
        if tokens not in self._tiles_by_tokens:
            self._tiles_by_tokens[tokens] = tile_slices(state, tokens, 2)
        return self._tiles_by_tokens[tokens]
