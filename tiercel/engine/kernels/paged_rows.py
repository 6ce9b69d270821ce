"""The common part of the paged attention kernels: read rows of the cache and fold them into a running softmax.

The cache is one layer of a block-first arena, kv [slots, block_size, kv_heads, 2 * head_dim] with any stride of slots.
A row is the key of one token and one head, followed by the value. Offsets of slots are 64-bit. A cache of 8 bits also
has scales: see `engine.kernels.quantized_kv`.
"""

import triton
import triton.language as tl

from tiercel.engine.kernels.quantized_kv import WIDE, read_scales, widen

LOG2E = tl.constexpr(1.4426950408889634)
UNSEEN = tl.constexpr(-1.0e30)  # a score of weight 0 in a softmax; finite, because -inf minus -inf would be NaN

# Arrays that the host fills in every step. Kernels are not specialised on their addresses, so they are compiled once.
HOST_ARRAYS = ("tables", "query_starts", "context_lengths")


@triton.jit
def tanh(x):
    """Return tanh(x) from the logistic function: accurate enough in float32, and without a device library."""
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)


@triton.jit
def first_seen(position, window, HAS_WINDOW: tl.constexpr):
    """Return the first key that the query at this position sees."""
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(position + 1 - window, 0)
    return first


@triton.jit
def load_slots(table, keys, lowest, context, BLOCK_SIZE: tl.constexpr):
    """Return the 64-bit slots of these keys; 0 for keys outside [lowest, context)."""
    return tl.load(table + keys // BLOCK_SIZE, mask=(keys >= lowest) & (keys < context), other=0).to(tl.int64)


@triton.jit
def fold(
    acc,
    peak,
    total,
    query,
    positions,
    kv,
    scales,
    table,
    first,
    last,
    lowest,
    context,
    slot_stride,
    row_stride,
    scale_slot_stride,
    scale_row_stride,
    window,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Fold the keys [first, last) into the running softmax of the query rows, tile by tile.

    Shapes: acc [ROWS, DIMS] float32, peak and total [ROWS] float32 (the largest score so far, in powers of two, and
            the sum of weights below it); query [ROWS, DIMS]; positions [ROWS] int32, of the queries; kv and scales:
            the first row of this head; table: the blocks of this sequence. `first` is a multiple of KEYS.
    Effects: without IS_MASKED every query sees every key of [first, last), which is a multiple of KEYS. With
             IS_MASKED only keys of [lowest, context) are read; the others count as 0 and are not visible, so that a
             NaN in a row that was never written has no effect.
    Source: FlashAttention-2 (arXiv 2307.08691) section 3.1.
    """
    dims = tl.arange(0, DIMS)
    keys = first + tl.arange(0, KEYS)
    # The slots of a tile are loaded one tile ahead. The loads of keys and values then depend on no other load of the
    # same iteration, and the compiler can start them several stages early.
    slots = load_slots(table, keys, lowest, context, BLOCK_SIZE)
    unit = LOG2E if HAS_SOFTCAP else scale * LOG2E
    for start in range(first, last, KEYS):
        keys = start + tl.arange(0, KEYS)
        rows = kv + (slots * slot_stride + (keys % BLOCK_SIZE) * row_stride)[:, None] + dims[None, :]
        scale_rows = scales + slots * scale_slot_stride + (keys % BLOCK_SIZE) * scale_row_stride
        slots = load_slots(table, keys + KEYS, lowest, context, BLOCK_SIZE)
        if IS_MASKED:
            is_written = ((keys >= lowest) & (keys < context))[:, None] & (dims < HEAD_DIM)[None, :]
            key = tl.load(rows, mask=is_written, other=0)
            value = tl.load(rows + HEAD_DIM, mask=is_written, other=0)
        elif HEAD_DIM == DIMS:
            key = tl.load(rows)
            value = tl.load(rows + HEAD_DIM)
        else:
            key = tl.load(rows, mask=(dims < HEAD_DIM)[None, :], other=0)
            value = tl.load(rows + HEAD_DIM, mask=(dims < HEAD_DIM)[None, :], other=0)
        if FORMAT != WIDE:
            is_key = (keys >= lowest) & (keys < context)
            key, value = widen(key, query.dtype, FORMAT), widen(value, query.dtype, FORMAT)
            value_scales = read_scales(scale_rows + 1, is_key, FORMAT)
            if query.dtype == tl.float16:  # a weight times a scale may be too small for it
                value = (value.to(tl.float32) * value_scales[:, None]).to(tl.float16)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if FORMAT != WIDE:
            scores = scores * read_scales(scale_rows, is_key, FORMAT)[None, :]
        if HAS_SOFTCAP:
            scores = softcap * tanh(scores * (scale / softcap))
        if IS_MASKED:
            is_seen = keys[None, :] <= positions[:, None]
            if HAS_WINDOW:
                is_seen = is_seen & (keys[None, :] > positions[:, None] - window)
            scores = tl.where(is_seen, scores, UNSEEN)
        # A row without a visible key so far accumulates weights of 1 here; its first real score scales them to 0.
        new_peak = tl.maximum(peak, tl.max(scores, 1) * unit)
        weights = tl.exp2(scores * unit - new_peak[:, None])
        fade = tl.exp2(peak - new_peak)
        total = total * fade + tl.sum(weights, 1)
        if FORMAT != WIDE and query.dtype != tl.float16:
            weights = weights * value_scales[None, :]
        acc = tl.dot(weights.to(value.dtype), value, acc * fade[:, None], input_precision=PRECISION)
        peak = new_peak
    return acc, peak, total
