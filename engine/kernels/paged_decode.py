"""Attention of single queries over the paged cache: every context is cut into parts, and the parts are merged."""

# Triton rewrites the functions that it decorates; what a type checker reads of them is something else.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.attention.base import AttentionParams, ForwardState
from engine.kernels.paged_rows import HOST_ARRAYS, LOG2E, UNSEEN, first_seen, fold
from engine.kernels.tiles import DECODE_TILES, MOST_SPLITS, Tile, choose_tile

_MERGED_AT_ONCE = 8  # parts


@triton.jit
def _tiles_in_sight(context, window, splits, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """The first tile that the last position sees, the tile behind the last one, and the tiles of one part."""
    first = first_seen(context - 1, window, HAS_WINDOW) // KEYS
    end = tl.cdiv(context, KEYS)
    return first, end, tl.cdiv(end - first, splits)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=HOST_ARRAYS)
def decode_kernel(
    query,
    kv,
    tables,
    query_starts,
    context_lengths,
    sinks,
    out,
    part_peaks,
    query_token_stride,
    query_head_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    slot_stride,
    row_stride,
    head_stride,
    window,
    scale,
    softcap,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: one part of one sequence's context for the GROUP heads of one key head.

    With IS_SPLIT `out` holds the parts [S, heads, splits, head_dim], and `part_peaks` [S, heads, splits] the logarithm
    of each part's weight; else there is one part, and it is the result. Nothing that the number of parts changes is an
    argument, so there are these two compilations of it and no more.
    """
    kv_head = tl.program_id(0)  # the fastest: neighbours in memory are read at the same time
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    sequence = tl.program_id(2)
    query_start = tl.load(query_starts + sequence)
    if tl.load(query_starts + sequence + 1) - query_start != 1:
        return
    context = tl.load(context_lengths + sequence)
    first_tile, end_tile, part_tiles = _tiles_in_sight(context, window, splits, KEYS, HAS_WINDOW)
    first_tile += split * part_tiles
    if first_tile >= end_tile:
        return

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    heads = kv_head * GROUP + rows
    is_row = rows < GROUP
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    queries = tl.load(
        query + query_start.to(tl.int64) * query_token_stride + (heads * query_head_stride)[:, None] + dims[None, :],
        mask=mask,
        other=0.0,
    )
    acc = tl.zeros([ROWS, DIMS], dtype=tl.float32)
    peak = tl.full([ROWS], UNSEEN, dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    if HAS_SINKS and not IS_SPLIT:
        peak = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2E
        total += 1.0
    acc, peak, total = fold(
        acc, peak, total, queries, tl.full([ROWS], context - 1, dtype=tl.int32),
        kv + kv_head * head_stride, tables + sequence.to(tl.int64) * table_stride,
        first_tile * KEYS, tl.minimum((first_tile + part_tiles) * KEYS, context),
        first_seen(context - 1, window, HAS_WINDOW), context,
        slot_stride, row_stride, window, scale, softcap,
        HEAD_DIM, DIMS, KEYS, BLOCK_SIZE, HAS_WINDOW, HAS_SOFTCAP, True, PRECISION,
    )  # fmt: skip
    if IS_SPLIT:
        at = (sequence.to(tl.int64) * tl.num_programs(0) * GROUP + heads) * splits + split
        tl.store(part_peaks + at, peak + tl.log2(total), mask=is_row)
        target = out + at * HEAD_DIM
    else:
        target = out + query_start.to(tl.int64) * out_token_stride + heads * out_head_stride
    tl.store(target[:, None] + dims[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=HOST_ARRAYS)
def merge_kernel(
    parts,
    part_peaks,
    query_starts,
    context_lengths,
    sinks,
    out,
    out_token_stride,
    out_head_stride,
    splits,
    window,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    KEYS: tl.constexpr,
    MOST: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One program: the parts of one head of one sequence, AT_ONCE of them at a time.

    MOST, a power of two, bounds `splits` whatever the number of sequences is: one compilation merges them all.
    """
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    query_start = tl.load(query_starts + sequence)
    if tl.load(query_starts + sequence + 1) - query_start != 1:
        return
    context = tl.load(context_lengths + sequence)
    first_tile, end_tile, part_tiles = _tiles_in_sight(context, window, splits, KEYS, HAS_WINDOW)
    part = tl.arange(0, MOST)
    dims = tl.arange(0, DIMS)
    written = tl.cdiv(end_tile - first_tile, part_tiles)  # the others were never written
    at = (sequence * tl.num_programs(0) + head).to(tl.int64) * splits
    peaks = tl.load(part_peaks + at + part, mask=part < written, other=UNSEEN)
    peak = tl.max(peaks, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        peak = tl.maximum(peak, sink)
    total = tl.sum(tl.exp2(peaks - peak), 0)
    if HAS_SINKS:
        total += tl.exp2(sink - peak)
    merged = tl.zeros([DIMS], dtype=tl.float32)
    for first in range(0, written, AT_ONCE):
        some = first + tl.arange(0, AT_ONCE)
        weights = tl.exp2(tl.load(part_peaks + at + some, mask=some < written, other=UNSEEN) - peak)
        values = tl.load(
            parts + (at + some)[:, None] * HEAD_DIM + dims[None, :],
            mask=(some < written)[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        merged += tl.sum(values * weights[:, None], 0)
    target = out + query_start.to(tl.int64) * out_token_stride + head * out_head_stride
    tl.store(target + dims, (merged / total).to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def attend_singles(
    query: Tensor,
    kv: Tensor,
    state: ForwardState,
    params: AttentionParams,
    out: Tensor,
    splits: int,
    tile: Tile | None = None,
) -> None:
    """Attention of every slice of one token over its sequence's context, cut into at most `splits` parts, and no
    more than MOST_SPLITS.

    Shapes:  query, out [T, heads, head_dim]; kv [slots, block_size, kv_heads, 2 * head_dim], any stride of slots.
    Cost:    one kernel that reads every key in sight once; with more than one part a second, small one, and a scratch
             of S * heads * splits * (head_dim + 1) floats.
    Effects: rows of `out` that belong to longer slices are not written. The launches depend on shapes only.
    Source:  FlashDecoding; the merge by log-sum-exp as in FlashAttention-2 (arXiv 2307.08691).
    """
    _, heads, head_dim = query.shape
    kv_heads, sequences = kv.shape[2], state.num_sequences
    splits = min(splits, MOST_SPLITS)
    tile = tile or choose_tile(DECODE_TILES, head_dim, query.dtype)
    parts = peaks = out
    if splits > 1:
        parts = torch.empty(sequences, heads, splits, head_dim, dtype=torch.float32, device=query.device)
        peaks = torch.empty(sequences, heads, splits, dtype=torch.float32, device=query.device)
    sinks = query if params.sinks is None else params.sinks
    dims = max(16, triton.next_power_of_2(head_dim))
    decode_kernel[(kv_heads, splits, sequences)](
        query,
        kv,
        state.block_tables,
        state.device_query_starts,
        state.device_context_lengths,
        sinks,
        parts,
        peaks,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        state.block_tables.stride(0),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        params.window or 0,
        params.scale,
        params.softcap or 0.0,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        DIMS=dims,
        ROWS=max(16, triton.next_power_of_2(heads // kv_heads)),
        KEYS=tile.keys,
        BLOCK_SIZE=kv.shape[1],
        IS_SPLIT=splits > 1,
        HAS_WINDOW=params.window is not None,
        HAS_SOFTCAP=params.softcap is not None,
        HAS_SINKS=params.sinks is not None,
        PRECISION="ieee" if query.dtype.itemsize == 4 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        merge_kernel[(heads, sequences)](
            parts,
            peaks,
            state.device_query_starts,
            state.device_context_lengths,
            sinks,
            out,
            out.stride(0),
            out.stride(1),
            splits,
            params.window or 0,
            HEAD_DIM=head_dim,
            DIMS=dims,
            KEYS=tile.keys,
            MOST=MOST_SPLITS,
            AT_ONCE=_MERGED_AT_ONCE,
            HAS_WINDOW=params.window is not None,
            HAS_SINKS=params.sinks is not None,
            num_warps=4,
        )
