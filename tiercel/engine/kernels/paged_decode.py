"""Attention of single queries over the paged cache: one program per part of a context, then a merge of the parts."""

# Triton rewrites decorated functions, so a type checker cannot check their calls.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiercel.engine.forward.state import AttentionParams, ForwardState
from tiercel.engine.kernels.paged_partition import Partition
from tiercel.engine.kernels.paged_rows import HOST_ARRAYS, LOG2E, UNSEEN, first_seen, fold
from tiercel.engine.kernels.quantized_kv import CacheArrays
from tiercel.engine.kernels.tiles import DECODE_FORM, MAX_SHARES, DecodeForm

_MERGED_AT_ONCE = 4096  # values of the parts: 32 per thread


@triton.jit
def merge_parts(
    part_values,
    part_peaks,
    first_part,
    count,
    head,
    heads,
    is_head,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Merge the parts of some heads of one sequence in ascending order, AT_ONCE parts at a time.

    MAX_PARTS, a power of two, bounds the parts of any sequence, so that one compilation serves all steps. Other
    programs of the same launch may have written the parts, so loads go past the first cache (.cg): it is not coherent.

    Shapes: head [H], is_head [H]: the heads that exist; returns [H, DIMS].
    """
    dims = tl.arange(0, DIMS)
    part = tl.arange(0, MAX_PARTS)
    at = (first_part + part).to(tl.int64)[:, None] * heads + head[None, :]
    is_part = (part < count)[:, None] & is_head[None, :]
    peaks = tl.load(part_peaks + at, mask=is_part, other=UNSEEN, cache_modifier=".cg")
    peak = tl.max(peaks, 0)
    total = tl.sum(tl.exp2(peaks - peak[None, :]), 0)
    merged = tl.zeros([head.shape[0], DIMS], dtype=tl.float32)
    for start in range(0, count, AT_ONCE):
        some = start + tl.arange(0, AT_ONCE)
        place = (first_part + some).to(tl.int64)[:, None] * heads + head[None, :]
        is_some = (some < count)[:, None] & is_head[None, :]
        loaded = tl.load(part_peaks + place, mask=is_some, other=UNSEEN, cache_modifier=".cg")
        weights = tl.exp2(loaded - peak[None, :])
        values = tl.load(
            (part_values + place * HEAD_DIM)[:, :, None] + dims[None, None, :],
            mask=is_some[:, :, None] & (dims < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        merged += tl.sum(values * weights[:, :, None], 0)
    return merged / total[:, None]


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=HOST_ARRAYS)
def decode_kernel(
    query,
    kv,
    scales,
    tables,
    query_starts,
    context_lengths,
    sinks,
    parts,
    part_starts,
    out,
    part_values,
    part_peaks,
    ended,
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
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    FORMAT: tl.constexpr,
    FOLDS_MERGE: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
    MERGED_HEADS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Compute one part of one sequence's context, for the GROUP heads of one key head.

    The only part of a context is written to `out`. For contexts with several parts, the results go to `part_values`
    [parts, heads, head_dim] and the logarithms of their weights to `part_peaks` [parts, heads]. With FOLDS_MERGE the
    program that ends last merges them into `out`: each adds 1 to its element of `ended` [S, kv_heads], and the last one
    sets it to 0 for the next launch. The order of merging, and so the result, does not depend on which one is last.
    MERGED_HEADS is GROUP rounded up to a power of two. See `merge_parts`, and `DecodeForm` for STARTS_EARLY.
    """
    if STARTS_EARLY:
        # In every program, also one without a part: the kernel after this one takes the end of all programs as a sign
        # that the kernels before have ended, too.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = tl.program_id(0)  # the fastest axis, so that neighbours in memory are read at the same time
    part = tl.program_id(1)
    room = tl.num_programs(1)
    sequence = tl.load(parts + part)
    first_tile = tl.load(parts + room + part)  # loaded before the part is known to exist: one wait, not two
    end_tile = tl.load(parts + 2 * room + part)
    if sequence < 0:
        return
    first_part = tl.load(part_starts + sequence)
    count = tl.load(part_starts + sequence + 1) - first_part
    query_start = tl.load(query_starts + sequence).to(tl.int64)
    context = tl.load(context_lengths + sequence)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    heads = kv_head * GROUP + rows
    is_row = rows < GROUP
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    queries = tl.load(
        query + query_start * query_token_stride + (heads * query_head_stride)[:, None] + dims[None, :],
        mask=mask,
        other=0.0,
    )
    acc = tl.zeros([ROWS, DIMS], dtype=tl.float32)
    peak = tl.full([ROWS], UNSEEN, dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    if HAS_SINKS:
        # Only the first part counts the attention sink, so that it counts once if parts are merged.
        sees_sink = part == first_part
        sink = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2E
        peak = tl.where(sees_sink, sink, peak)
        total += tl.where(sees_sink, 1.0, 0.0)
    acc, peak, total = fold(
        acc, peak, total, queries, tl.full([ROWS], context - 1, dtype=tl.int32),
        kv + kv_head * head_stride, scales + kv_head * scale_head_stride,
        tables + sequence.to(tl.int64) * table_stride,
        first_tile * KEYS, tl.minimum(end_tile * KEYS, context),
        first_seen(context - 1, window, HAS_WINDOW), context,
        slot_stride, row_stride, scale_slot_stride, scale_row_stride, window, scale, softcap,
        HEAD_DIM, DIMS, KEYS, BLOCK_SIZE, HAS_WINDOW, HAS_SOFTCAP, True, PRECISION, FORMAT,
    )  # fmt: skip
    found = acc / total[:, None]
    if count == 1:
        target = out + query_start * out_token_stride + heads * out_head_stride
        tl.store(target[:, None] + dims[None, :], found.to(out.dtype.element_ty), mask=mask)
    else:
        at = part.to(tl.int64) * tl.num_programs(0) * GROUP + heads
        tl.store(part_peaks + at, peak + tl.log2(total), mask=is_row)
        tl.store((part_values + at * HEAD_DIM)[:, None] + dims[None, :], found, mask=mask)
        if FOLDS_MERGE:
            tl.debug_barrier()  # the count of one thread then publishes the stores of all
            own = ended + sequence * tl.num_programs(0) + kv_head
            before = tl.atomic_add(own, 1, sem="acq_rel", scope="gpu")
            if before == count - 1:
                tl.store(own, 0)
                row = tl.arange(0, MERGED_HEADS)
                head = kv_head * GROUP + row
                merged = merge_parts(
                    part_values, part_peaks, first_part, count, head, tl.num_programs(0) * GROUP, row < GROUP,
                    HEAD_DIM, DIMS, MAX_PARTS, AT_ONCE,
                )  # fmt: skip
                target = out + query_start * out_token_stride + head * out_head_stride
                tl.store(
                    target[:, None] + dims[None, :],
                    merged.to(out.dtype.element_ty),
                    mask=(row < GROUP)[:, None] & (dims < HEAD_DIM)[None, :],
                )


@triton.jit(do_not_specialize_on_alignment=HOST_ARRAYS)
def merge_kernel(
    part_values,
    part_peaks,
    divided,
    part_starts,
    query_starts,
    out,
    out_token_stride,
    out_head_stride,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    """Merge the parts of one head of one sequence. See `merge_parts`."""
    if STARTS_EARLY:
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0) + tl.arange(0, 1)
    sequence = tl.load(divided + tl.program_id(1))
    if sequence < 0:
        return
    first_part = tl.load(part_starts + sequence)
    count = tl.load(part_starts + sequence + 1) - first_part
    query_start = tl.load(query_starts + sequence).to(tl.int64)
    merged = merge_parts(
        part_values,
        part_peaks,
        first_part,
        count,
        head,
        tl.num_programs(0),
        head >= 0,
        HEAD_DIM,
        DIMS,
        MAX_PARTS,
        AT_ONCE,
    )
    dims = tl.arange(0, DIMS)
    target = out + query_start * out_token_stride + head * out_head_stride
    tl.store(target[:, None] + dims[None, :], merged.to(out.dtype.element_ty), mask=(dims < HEAD_DIM)[None, :])


def attend_singles(
    query: Tensor,
    kv: Tensor,
    state: ForwardState,
    params: AttentionParams,
    out: Tensor,
    partition: Partition,
    form: DecodeForm = DECODE_FORM,
) -> None:
    """Compute attention of every slice of one token over its sequence's context, and write it to `out`.

    `partition` is the partition of this step and window, with at most MAX_SHARES shares.

    Shapes:  query, out [T, heads, head_dim]; kv [slots, block_size, kv_heads, width], any stride of slots.
    Cost:    one kernel that reads every visible key once; a second, small kernel that merges the parts, unless `form`
             folds it into the first; scratch memory of (S + shares) * heads * (head_dim + 1) floats.
    Effects: rows of `out` that belong to longer slices are not written. The launches depend on shapes only.
    Source:  FlashDecoding; the merge by log-sum-exp as in FlashAttention-2 (arXiv 2307.08691).
    """
    _, heads, head_dim = query.shape
    kv_heads, room, tile = kv.shape[2], partition.parts.shape[1], partition.tile
    part_values = torch.empty(room, heads, head_dim, dtype=torch.float32, device=query.device)
    part_peaks = torch.empty(room, heads, dtype=torch.float32, device=query.device)
    dims = max(16, triton.next_power_of_2(head_dim))
    group = heads // kv_heads
    merged_heads = triton.next_power_of_2(group)
    cache = CacheArrays.of(kv)
    decode_kernel[(kv_heads, room)](
        query,
        cache.rows,
        cache.scales,
        state.block_tables,
        state.device_query_starts,
        state.device_context_lengths,
        query if params.sinks is None else params.sinks,
        partition.parts,
        partition.part_starts,
        out,
        part_values,
        part_peaks,
        partition.ended,
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
        DIMS=dims,
        ROWS=max(16, merged_heads),
        KEYS=tile.keys,
        BLOCK_SIZE=kv.shape[1],
        HAS_WINDOW=params.window is not None,
        HAS_SOFTCAP=params.softcap is not None,
        HAS_SINKS=params.sinks is not None,
        PRECISION="ieee" if query.dtype.itemsize == 4 else "tf32",
        FORMAT=cache.format,
        FOLDS_MERGE=form.folds_merge,
        STARTS_EARLY=form.starts_early,
        MERGED_HEADS=merged_heads,
        MAX_PARTS=MAX_SHARES,
        AT_ONCE=max(1, _MERGED_AT_ONCE // (dims * merged_heads)),
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=form.starts_early,
    )
    if form.folds_merge:
        return
    merge_kernel[(heads, len(partition.divided))](
        part_values,
        part_peaks,
        partition.divided,
        partition.part_starts,
        state.device_query_starts,
        out,
        out.stride(0),
        out.stride(1),
        HEAD_DIM=head_dim,
        DIMS=dims,
        MAX_PARTS=MAX_SHARES,
        AT_ONCE=max(1, _MERGED_AT_ONCE // dims),
        STARTS_EARLY=form.starts_early,
        num_warps=4,
        launch_pdl=form.starts_early,
    )
