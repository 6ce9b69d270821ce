"""Cut the slices of a prefill into tiles of tokens, on the device, so that no program is launched for other slices."""

# Triton rewrites decorated functions, so a type checker cannot check their calls.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiercel.engine.forward.state import ForwardState
from tiercel.engine.kernels.paged_rows import HOST_ARRAYS

_AT_ONCE = 512  # sequences, a power of two


@dataclass(frozen=True, slots=True)
class SliceTiles:
    """The tiles of a step's slices of at least some number of tokens. A tile has tokens of one slice only.

    At most L slices are long enough: the host knows their number and that of their tiles, or bounds of them if a graph
    is recorded. The arrays are made on the device, so that no copy is needed.

    Shapes: sequences [L] int32, in ascending order; starts [L + 1] int32: the first tile of each, and the number
            of all tiles. If there are fewer slices, all further starts are that number.
    """

    sequences: Tensor
    starts: Tensor
    count: int  # of tiles, or a bound of it
    tokens: int  # of a tile


@triton.jit(do_not_specialize=["sequences", "slices"], do_not_specialize_on_alignment=HOST_ARRAYS)
def slice_kernel(
    query_starts,
    long_slices,
    tile_starts,
    sequences,
    slices,
    TOKENS: tl.constexpr,
    LEAST_LENGTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """List the slices of at least LEAST_LENGTH tokens, at most `slices`, and their first tiles, in one program."""
    listed = 0
    tiles = 0
    for start in range(0, sequences, AT_ONCE):
        sequence = start + tl.arange(0, AT_ONCE)
        is_one = sequence < sequences
        begin = tl.load(query_starts + sequence, mask=is_one, other=0)
        length = tl.load(query_starts + sequence + 1, mask=is_one, other=0) - begin
        is_long = is_one & (length >= LEAST_LENGTH)
        counts = tl.where(is_long, tl.cdiv(length, TOKENS), 0)
        at = listed + tl.cumsum(is_long.to(tl.int32), 0) - 1
        tl.store(long_slices + at, sequence, mask=is_long)
        tl.store(tile_starts + at, tiles + tl.cumsum(counts, 0) - counts, mask=is_long)
        listed += tl.sum(is_long.to(tl.int32), 0)
        tiles += tl.sum(counts, 0)
    for start in range(listed, slices + 1, AT_ONCE):
        at = start + tl.arange(0, AT_ONCE)
        tl.store(tile_starts + at, tiles, mask=at <= slices)


def tile_slices(state: ForwardState, tokens: int, least_length: int, at_once: int = _AT_ONCE) -> SliceTiles:
    """Cut the slices of at least `least_length` tokens into tiles of `tokens`.

    Cost: one program that reads the starts of the slices, once per step for all layers of one tile.
    """
    lengths = [end - start for start, end in pairwise(state.query_starts)]
    long = [length for length in lengths if length >= least_length]
    device = state.device_query_starts.device
    sequences = torch.empty(len(long), dtype=torch.int32, device=device)
    starts = torch.empty(len(long) + 1, dtype=torch.int32, device=device)
    slice_kernel[(1,)](
        state.device_query_starts,
        sequences,
        starts,
        len(lengths),
        len(long),
        TOKENS=tokens,
        LEAST_LENGTH=least_length,
        AT_ONCE=at_once,
        num_warps=4,
    )
    return SliceTiles(sequences, starts, sum(-(-length // tokens) for length in long), tokens)
