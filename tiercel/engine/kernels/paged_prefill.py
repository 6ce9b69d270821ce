"""Attention of ragged slices over the paged cache: prefills, also in steps that mix them with decodes."""

# Triton rewrites decorated functions, so a type checker cannot check their calls.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl
from torch import Tensor

from tiercel.engine.forward.kv_cache import is_quantized
from tiercel.engine.forward.state import AttentionParams, ForwardState
from tiercel.engine.kernels.paged_rows import HOST_ARRAYS, LOG2E, UNSEEN, first_seen, fold
from tiercel.engine.kernels.paged_slices import SliceTiles
from tiercel.engine.kernels.quantized_kv import CacheArrays
from tiercel.engine.kernels.tiles import PREFILL_TILES, Tile, choose_tile, with_room_to_widen


@triton.jit
def _find_slice(tile_starts, slices, tile):
    """Return the index of the slice that owns a tile, by bisection."""
    low = 0
    high = slices
    while low < high:
        middle = (low + high) // 2
        if tl.load(tile_starts + middle) <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(do_not_specialize=["slices", "table_stride"], do_not_specialize_on_alignment=HOST_ARRAYS)
def prefill_kernel(
    query,
    kv,
    scales,
    tables,
    query_starts,
    context_lengths,
    sinks,
    long_slices,
    tile_starts,
    out,
    slices,
    query_token_stride,
    query_head_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    slot_stride,
    row_stride,
    head_stride,
    scale_slot_stride,
    scale_row_stride,
    scale_head_stride,
    window,
    scale,
    softcap,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Compute a tile of TOKENS tokens of one slice, for the GROUP heads of one key head.

    `long_slices` [slices] are the sequences of the slices that this kernel computes, `tile_starts` their first tiles.
    """
    # In reverse order: the last tiles of a sequence see most keys, and should not be the last to start.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    if tile >= tl.load(tile_starts + slices):  # a graph has programs for as many tiles as there may be
        return
    found = _find_slice(tile_starts, slices, tile)
    sequence = tl.load(long_slices + found)
    query_start = tl.load(query_starts + sequence)
    length = tl.load(query_starts + sequence + 1) - query_start
    context = tl.load(context_lengths + sequence)
    first_token = (tile - tl.load(tile_starts + found)) * TOKENS

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    tokens = first_token + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_row = (rows < TOKENS * GROUP) & (tokens < length)
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    at = (query_start + tokens).to(tl.int64)
    queries = tl.load(
        query + (at * query_token_stride + heads * query_head_stride)[:, None] + dims[None, :], mask=mask, other=0.0
    )
    first_position = context - length + first_token
    last_position = tl.minimum(first_position + TOKENS, context) - 1
    positions = first_position + rows // GROUP

    acc = tl.zeros([ROWS, DIMS], dtype=tl.float32)
    if HAS_SINKS:
        peak = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2E
        total = tl.full([ROWS], 1.0, dtype=tl.float32)
    else:
        peak = tl.full([ROWS], UNSEEN, dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)

    table = tables + sequence.to(tl.int64) * table_stride
    head = kv + kv_head * head_stride
    head_scales = scales + kv_head * scale_head_stride
    lowest = first_seen(first_position, window, HAS_WINDOW)
    end = last_position + 1
    # Keys [inner, middle) are seen by every query of the tile; those before by some (a window), those after too.
    inner = lowest // KEYS * KEYS
    middle = tl.maximum((first_position + 1) // KEYS * KEYS, inner)
    if HAS_WINDOW:
        edge = inner
        inner = tl.cdiv(first_seen(last_position, window, HAS_WINDOW), KEYS) * KEYS
        middle = tl.maximum(middle, inner)
        acc, peak, total = fold(
            acc, peak, total, queries, positions, head, head_scales, table, edge, tl.minimum(inner, end), lowest, end,
            slot_stride, row_stride, scale_slot_stride, scale_row_stride, window, scale, softcap,
            HEAD_DIM, DIMS, KEYS, BLOCK_SIZE, HAS_WINDOW, HAS_SOFTCAP, True, PRECISION, FORMAT,
        )  # fmt: skip
    acc, peak, total = fold(
        acc, peak, total, queries, positions, head, head_scales, table, inner, middle, lowest, end,
        slot_stride, row_stride, scale_slot_stride, scale_row_stride, window, scale, softcap,
        HEAD_DIM, DIMS, KEYS, BLOCK_SIZE, HAS_WINDOW, HAS_SOFTCAP, False, PRECISION, FORMAT,
    )  # fmt: skip
    acc, peak, total = fold(
        acc, peak, total, queries, positions, head, head_scales, table, middle, end, lowest, end,
        slot_stride, row_stride, scale_slot_stride, scale_row_stride, window, scale, softcap,
        HEAD_DIM, DIMS, KEYS, BLOCK_SIZE, HAS_WINDOW, HAS_SOFTCAP, True, PRECISION, FORMAT,
    )  # fmt: skip

    target = out + (at * out_token_stride + heads * out_head_stride)[:, None] + dims[None, :]
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


def choose_prefill_tile(query: Tensor, kv: Tensor) -> Tile:
    """Return the tile of the table for these heads and this cache."""
    tile = choose_tile(PREFILL_TILES, query.shape[2], query.dtype)
    return with_room_to_widen(tile) if is_quantized(kv) else tile


def tile_rows(tile: Tile, group: int) -> tuple[int, int]:
    """Return the query rows of a tile and its tokens, for `group` heads of a key head."""
    rows = max(tile.rows, int(triton.next_power_of_2(group)))
    return rows, rows // group


def attend_slices(
    query: Tensor,
    kv: Tensor,
    state: ForwardState,
    params: AttentionParams,
    out: Tensor,
    tile: Tile,
    tiles: SliceTiles,
) -> None:
    """Compute causal attention of every slice in `tiles` over its sequence's context.

    `tiles` are those of this step with as many tokens as `tile` has.

    Shapes:  query, out [T, heads, head_dim]; kv [slots, block_size, kv_heads, width], any stride of slots.
    Cost:    one kernel with one program for every tile and key head, and none for other slices.
    Effects: rows of `out` that belong to other slices are not written.
    """
    _, heads, head_dim = query.shape
    kv_heads = kv.shape[2]
    group, cache = heads // kv_heads, CacheArrays.of(kv)
    rows, tile_tokens = tile_rows(tile, group)
    if not tiles.count:
        return
    prefill_kernel[(tiles.count, kv_heads)](
        query,
        cache.rows,
        cache.scales,
        state.block_tables,
        state.device_query_starts,
        state.device_context_lengths,
        query if params.sinks is None else params.sinks,
        tiles.sequences,
        tiles.starts,
        out,
        len(tiles.sequences),
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        state.block_tables.stride(0),
        *cache.rows.stride()[:3],
        *cache.scales.stride()[:3],
        params.window or 0,
        params.scale,
        params.softcap or 0.0,
        GROUP=group,
        HEAD_DIM=head_dim,
        DIMS=max(16, triton.next_power_of_2(head_dim)),
        ROWS=rows,
        TOKENS=tile_tokens,
        KEYS=tile.keys,
        BLOCK_SIZE=kv.shape[1],
        HAS_WINDOW=params.window is not None,
        HAS_SOFTCAP=params.softcap is not None,
        HAS_SINKS=params.sinks is not None,
        PRECISION="ieee" if query.dtype.itemsize == 4 else "tf32",
        FORMAT=cache.format,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
