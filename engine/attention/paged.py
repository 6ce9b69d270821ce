"""The portable backend of a GPU: our own paged kernels in Triton."""

from itertools import pairwise

from torch import Tensor

from engine.attention.base import AttentionParams, ForwardState
from engine.kernels.paged_decode import attend_singles
from engine.kernels.paged_prefill import attend_slices
from engine.kernels.paged_store import store_rows
from engine.kernels.tiles import Tile, choose_splits


class TritonAttention:
    """Slices of one token through the decode kernel, longer ones through the prefill kernel.

    A step that mixes them launches both. A query of one token fills a few rows of the tile that a prompt needs, and
    one program would walk its whole context alone; the decode kernel packs it into the smallest tile and cuts the
    context into parts. Each kernel leaves the other's slices at once.
    """

    is_capturable = True

    def __init__(self, processors: int, prefill_tile: Tile | None = None, decode_tile: Tile | None = None) -> None:
        """`processors`: streaming multiprocessors; the tiles are those of the table unless others are tried."""
        self._processors = processors
        self._prefill_tile = prefill_tile
        self._decode_tile = decode_tile
        self._state: ForwardState | None = None  # the step that was seen last, and whether it decodes too
        self._has_singles = False
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
        self._compile_decode(query, kv, state, params, out)
        if self._mixes_singles(state):
            splits = choose_splits(state.num_sequences, kv.shape[2], self._processors)
            attend_singles(query, kv, state, params, out, splits, self._decode_tile)
        if not state.is_decode:
            attend_slices(query, kv, state, params, out, 2, self._prefill_tile)
        return out

    def _compile_decode(
        self, query: Tensor, kv: Tensor, state: ForwardState, params: AttentionParams, out: Tensor
    ) -> None:
        """At the first sight of a kind of layer run its decode with one part and with two: that is all there is to
        compile, and no later step waits for a compiler. Longer slices are left at once, single ones computed twice."""
        kind = (query.shape[1:], params.window, params.softcap is None, params.sinks is None)
        if kind not in self._kinds:
            self._kinds.add(kind)
            for splits in (1, 2):
                attend_singles(query, kv, state, params, out, splits, self._decode_tile)

    def _mixes_singles(self, state: ForwardState) -> bool:
        """Whether any slice has one token; found by the first layer, kept for the others."""
        if self._state is not state:
            starts = state.query_starts
            self._state = state
            self._has_singles = any(end - start == 1 for start, end in pairwise(starts))
        return self._has_singles
