"""The portable GPU backend: paged attention kernels in Triton."""

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

from torch import Tensor

from tiercel.engine.forward.state import AttentionParams, ForwardState
from tiercel.engine.kernels.paged_decode import attend_singles
from tiercel.engine.kernels.paged_partition import Partition, partition_contexts
from tiercel.engine.kernels.paged_prefill import attend_slices, choose_prefill_tile, tile_rows
from tiercel.engine.kernels.paged_slices import SliceTiles, tile_slices
from tiercel.engine.kernels.paged_store import store_rows
from tiercel.engine.kernels.tiles import DECODE_FORM, DECODE_TILES, DecodeForm, Tile, choose_shares, choose_tile


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Facts of a step that its first layer computes for all others."""

    state: ForwardState
    has_singles: bool  # any slice has one token
    # by window, shares, tile and key heads
    partition_by_kind: dict[tuple[int | None, int, Tile, int], Partition] = field(default_factory=dict)
    tiles_by_tokens: dict[int, SliceTiles] = field(default_factory=dict)


class TritonAttention:
    """Computes slices of one token with the decode kernel and longer slices with the prefill kernel.

    A step that mixes them launches both. In the prefill kernel a query of one token would fill only a few rows of a
    tile, and one program would read its whole context alone. The decode kernel uses the smallest tile and cuts all
    contexts of the step into parts of one size. The decode kernel has no part for longer slices, and the prefill kernel
    no program for slices of one token.

    Facts of a step are cached by its state object: new lengths on the device, or the recording of a graph, come with a
    new state. Two states are remembered, because the layers of two halves of a step may alternate.
    """

    name = "triton"
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
        self._facts: deque[StepFacts] = deque(maxlen=2)  # of the last states
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
        facts = self._facts_of(state)
        if facts.has_singles or kind not in self._kinds:
            self._kinds.add(kind)
            partition = self._partition(query, kv.shape[2], facts, params.window)
            attend_singles(query, kv, state, params, out, partition, self._form)
        if not state.is_decode:
            tile = self._prefill_tile or choose_prefill_tile(query, kv)
            tiles = _slice_tiles(facts, tile_rows(tile, query.shape[1] // kv.shape[2])[1])
            attend_slices(query, kv, state, params, out, tile, tiles)
        return out

    def _facts_of(self, state: ForwardState) -> StepFacts:
        for facts in self._facts:
            if facts.state is state:
                return facts
        self._facts.append(StepFacts(state, any(end - start == 1 for start, end in pairwise(state.query_starts))))
        return self._facts[-1]

    def _partition(self, query: Tensor, kv_heads: int, facts: StepFacts, window: int | None) -> Partition:
        """Return the partition of the step's contexts; the first layer of each window computes it for the others."""
        tile = self._decode_tile or choose_tile(DECODE_TILES, query.shape[2], query.dtype)
        kind = (window, choose_shares(kv_heads, self._processors), tile, kv_heads)
        if kind not in facts.partition_by_kind:
            facts.partition_by_kind[kind] = partition_contexts(facts.state, *kind)
        return facts.partition_by_kind[kind]


def _slice_tiles(facts: StepFacts, tokens: int) -> SliceTiles:
    """Return the tiles of the step's longer slices; the first layer computes them for the others."""
    if tokens not in facts.tiles_by_tokens:
        facts.tiles_by_tokens[tokens] = tile_slices(facts.state, tokens, 2)
    return facts.tiles_by_tokens[tokens]
