"""Cut the contexts of a decode into parts of one size over all sequences, on the device."""

# Triton rewrites decorated functions, so a type checker cannot check their calls.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiercel.engine.forward.state import ForwardState
from tiercel.engine.kernels.paged_rows import HOST_ARRAYS, first_seen
from tiercel.engine.kernels.tiles import Tile

_AT_ONCE = 512  # sequences, a power of two: the rows of the largest graph


@dataclass(frozen=True, slots=True)
class Partition:
    """The parts of a step's contexts, for layers of one window.

    S sequences have at most S + shares parts; the remaining rows are unused. A part is at most 1 / shares of all
    visible tiles long, rounded up, so that no sequence has more than `shares` parts.

    Shapes: parts [3, S + shares] int32: the sequence of each part, or -1; its first tile; the end of its tiles.
            part_starts [S + 1] int32: the first part of each sequence, and the number of all parts. divided
            [min(S, shares)] int32: the sequences with several parts, then -1. ended [S, kv_heads] int32: 0 between two
            launches of the decode kernel, which counts in it the parts that have ended.
    """

    parts: Tensor
    part_starts: Tensor
    divided: Tensor
    ended: Tensor
    tile: Tile  # defines the number of keys of a tile


@triton.jit
def _tiles_in_sight(
    query_starts,
    context_lengths,
    sequence,
    sequences,
    window,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Return the first visible tile of a slice of one token and the number of visible tiles; 0 for longer slices."""
    is_one = sequence < sequences
    start = tl.load(query_starts + sequence, mask=is_one, other=0)
    end = tl.load(query_starts + sequence + 1, mask=is_one, other=0)
    context = tl.load(context_lengths + sequence, mask=end - start == 1, other=0)
    first = first_seen(context - 1, window, HAS_WINDOW) // KEYS
    return first, tl.cdiv(context, KEYS) - first


@triton.jit(do_not_specialize=["sequences", "shares", "kv_heads"], do_not_specialize_on_alignment=HOST_ARRAYS)
def partition_kernel(
    query_starts,
    context_lengths,
    parts,
    part_starts,
    divided,
    ended,
    sequences,
    shares,
    window,
    kv_heads,
    KEYS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Count the visible tiles, then assign them to parts, AT_ONCE sequences at a time. There is only one program."""
    total = 0
    for start in range(0, sequences, AT_ONCE):
        sequence = start + tl.arange(0, AT_ONCE)
        _, tiles = _tiles_in_sight(query_starts, context_lengths, sequence, sequences, window, KEYS, HAS_WINDOW)
        total += tl.sum(tiles, 0)
    part_tiles = tl.maximum(tl.cdiv(total, shares), 1)

    room = sequences + shares
    given = 0
    several = 0
    for start in range(0, sequences, AT_ONCE):
        sequence = start + tl.arange(0, AT_ONCE)
        first, tiles = _tiles_in_sight(query_starts, context_lengths, sequence, sequences, window, KEYS, HAS_WINDOW)
        counts = tl.cdiv(tiles, part_tiles)
        starts = given + tl.cumsum(counts, 0) - counts
        tl.store(part_starts + sequence, starts, mask=sequence < sequences)
        is_divided = (counts > 1).to(tl.int32)
        tl.store(divided + several + tl.cumsum(is_divided, 0) - 1, sequence, mask=counts > 1)
        for turn in range(tl.max(counts, 0)):
            part = parts + starts + turn
            begin = turn * part_tiles
            has_part = turn < counts
            tl.store(part, sequence, mask=has_part)
            tl.store(part + room, first + begin, mask=has_part)
            tl.store(part + 2 * room, first + tl.minimum(begin + part_tiles, tiles), mask=has_part)
        given += tl.sum(counts, 0)
        several += tl.sum(is_divided, 0)
    tl.store(part_starts + sequences, given)
    for start in range(given, room, AT_ONCE):
        part = start + tl.arange(0, AT_ONCE)
        tl.store(parts + part, -1, mask=part < room)
    for start in range(several, tl.minimum(sequences, shares), AT_ONCE):
        at = start + tl.arange(0, AT_ONCE)
        tl.store(divided + at, -1, mask=at < tl.minimum(sequences, shares))
    for start in range(0, sequences * kv_heads, AT_ONCE):
        at = start + tl.arange(0, AT_ONCE)
        tl.store(ended + at, 0, mask=at < sequences * kv_heads)


def partition_contexts(
    state: ForwardState, window: int | None, shares: int, tile: Tile, kv_heads: int, at_once: int = _AT_ONCE
) -> Partition:
    """Cut the contexts of all slices of one token; longer slices have no part.

    `shares` is the maximum number of parts of a sequence, at least 1. It must depend on shapes only, because a CUDA
    graph holds the launches that follow from it. A longer sequence gets more of the parts.

    Cost:   one program that reads the lengths twice and writes the parts, once per step for all layers of one window.
    Source: LeanAttention (arXiv 2405.10480), with the sizes on the device.
    """
    sequences, device = state.num_sequences, state.device_context_lengths.device
    parts = torch.empty(3, sequences + shares, dtype=torch.int32, device=device)
    part_starts = torch.empty(sequences + 1, dtype=torch.int32, device=device)
    divided = torch.empty(min(sequences, shares), dtype=torch.int32, device=device)
    ended = torch.empty(sequences, kv_heads, dtype=torch.int32, device=device)
    partition_kernel[(1,)](
        state.device_query_starts,
        state.device_context_lengths,
        parts,
        part_starts,
        divided,
        ended,
        sequences,
        shares,
        window or 0,
        kv_heads,
        KEYS=tile.keys,
        AT_ONCE=at_once,
        HAS_WINDOW=window is not None,
        num_warps=4,
    )
    return Partition(parts, part_starts, divided, ended, tile)
