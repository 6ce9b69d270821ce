"""Device memory full of random KV, viewed as an arena of any block size and layout."""

import torch
from torch import Tensor

from benchmarks.gpu.bounds import ModelShape
from benchmarks.gpu.timing import BF16, DEVICE
from tiercel.engine.forward.state import AttentionParams, ForwardState

ARENA_BYTES = 100e9  # as much as a serving engine reads: more than the translations of addresses that a device keeps
ARENA_SHARE = 0.85  # of the free memory of smaller devices
_PIECE = 1 << 30  # elements filled at a time


def arena_tokens(model: ModelShape, layers: int, least: int, free_bytes: float) -> int:
    """Return the tokens of an arena of 100 GB, or of 85 % of the free memory, but at least `least`."""
    return max(least, int(min(ARENA_BYTES, ARENA_SHARE * free_bytes)) // (layers * model.layer_token_bytes))


def free_bytes() -> int:
    """Return the free memory of the device."""
    return torch.cuda.mem_get_info()[0]


class Pool:
    """KV of `tokens` tokens in `layers` layers of a model.

    Block-first, as in the arenas: [slots, layers, block_size, kv_heads, 2 * head_dim]; a layer is a strided view.
    Layer-first: [layers, slots, ...].
    """

    def __init__(
        self,
        model: ModelShape,
        tokens: int,
        layers: int,
        place: torch.device = DEVICE,
        dtype: torch.dtype = BF16,
    ) -> None:
        self.model = model
        self.tokens = tokens
        self.layers = layers
        self.place = place
        self.dtype = dtype
        width = model.kv_heads * 2 * model.head_dim
        self._flat = torch.empty(tokens * layers * width, dtype=dtype, device=place)
        pieces = self._flat.split(_PIECE)
        pieces[0].normal_(generator=torch.Generator(place).manual_seed(0))
        for piece in pieces[1:]:  # copies, because drawing 100 GB takes seconds
            piece.copy_(pieces[0][: len(piece)])

    @property
    def gb(self) -> float:
        """The size in GB."""
        return self._flat.nbytes / 1e9

    def layer(self, block_size: int, *, is_block_first: bool = True) -> Tensor:
        """Return the second layer. Shapes: returns [slots, block_size, kv_heads, 2 * head_dim]."""
        slots, model = self.tokens // block_size, self.model
        rest = (block_size, model.kv_heads, 2 * model.head_dim)
        index = min(1, self.layers - 1)
        used = self._flat[: slots * self.layers * block_size * rest[1] * rest[2]]
        if is_block_first:
            return used.view(slots, self.layers, *rest)[:, index]
        return used.view(self.layers, slots, *rest)[index]

    def state(
        self, slices: list[tuple[int, int]], block_size: int, seed: int = 0, *, is_narrow: bool = False
    ) -> ForwardState:
        """Return the state of sequences of (tokens before, tokens of the slice) with blocks scattered over the arena.

        They write the null block. `is_narrow`: the blocks are scattered over no more slots than they need.
        """
        ends = [start + length for start, length in slices]
        counts = [-(-end // block_size) for end in ends]
        reach = sum(counts) if is_narrow else self.tokens // block_size - 1
        slots = torch.randperm(reach, generator=torch.Generator().manual_seed(seed)) + 1
        tables = torch.zeros(len(slices), max(counts), dtype=torch.int64)
        used = 0
        for row, count in enumerate(counts):
            tables[row, :count] = slots[used : used + count]
            used += count
        starts = [start for start, _ in slices]
        return ForwardState.of_slices(tables.to(self.place), starts, ends, block_size, writes_null_block=True)

    def queries(self, state: ForwardState) -> Tensor:
        """Draw queries. Shapes: returns [T, heads, head_dim]."""
        shape = (state.query_starts[-1], self.model.heads, self.model.head_dim)
        return torch.randn(shape, device=self.place, dtype=self.dtype)

    @property
    def params(self) -> AttentionParams:
        """Return attention parameters with only a scale."""
        return AttentionParams(self.model.head_dim**-0.5)


def causal_flop(model: ModelShape, slices: list[tuple[int, int]]) -> int:
    """Return the operations of attention: two products of every query with every visible key."""
    pairs = sum(length * start + length * (length + 1) // 2 for start, length in slices)
    return 4 * model.heads * model.head_dim * pairs


def read_bytes(model: ModelShape, slices: list[tuple[int, int]]) -> int:
    """Return the KV bytes of one layer that decodes read."""
    return sum(start + length for start, length in slices) * model.layer_token_bytes
