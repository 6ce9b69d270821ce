"""What the paged attention kernels share: reading rows of the cache, and folding a run of them into a softmax.

The cache is one layer of a block-first arena, kv [slots, block_size, kv_heads, 2 * head_dim] with any stride of slots:
a row is the key and the value of one token and one head behind each other. Offsets of slots are 64-bit.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
UNSEEN = tl.constexpr(-1.0e30)  # a score that no softmax notices, and finite: -inf minus -inf would be NaN

# Arrays that the host fills anew at every step: the kernels make nothing of where they lie, and are compiled once.
HOST_ARRAYS = ("tables", "query_starts", "context_lengths")


@triton.jit
def tanh(x):
    """Twice a logistic function, shifted: exact enough in float32, and free of a device library."""
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)


@triton.jit
def first_seen(position, window, HAS_WINDOW: tl.constexpr):
    """The first key that the query at this position sees."""
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(position + 1 - window, 0)
    return first


@triton.jit
def load_slots(table, keys, lowest, context, BLOCK_SIZE: tl.constexpr):
    """The slots of these keys, 64-bit; 0 for keys outside [lowest, context)."""
    return tl.load(table + keys // BLOCK_SIZE, mask=(keys >= lowest) & (keys < context), other=0).to(tl.int64)


@triton.jit
def fold(
    acc,
    peak,
    total,
    query,
    positions,
    kv,
    table,
    first,
    last,
    lowest,
    context,
    slot_stride,
    row_stride,
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
):
    """Fold the keys [first, last) into the running softmax of the query rows, tile by tile.

    Shapes: acc [ROWS, DIMS] float32, peak and total [ROWS] float32 (the largest score so far, in powers of two, and
            the sum of weights below it); query [ROWS, DIMS]; positions [ROWS] int32, of the queries; kv: the first
            row of this head; table: the blocks of this sequence. `first` is a multiple of KEYS.
    Effects: without IS_MASKED every query sees every key of [first, last), a multiple of KEYS. Else only keys of
            [lowest, context) are read; the others count as 0 and are seen by nobody, so that a NaN in a row which
            nobody wrote stays there.
    Source: FlashAttention-2 (arXiv 2307.08691) section 3.1.
    """
    dims = tl.arange(0, DIMS)
    keys = first + tl.arange(0, KEYS)
    # The slots of a tile are loaded one tile ahead: the loads of keys and values then hang on no other load of
    # their own turn, and the compiler starts them as many stages early as it has room for.
    slots = load_slots(table, keys, lowest, context, BLOCK_SIZE)
    unit = LOG2E if HAS_SOFTCAP else scale * LOG2E
    for start in range(first, last, KEYS):
        keys = start + tl.arange(0, KEYS)
        rows = kv + (slots * slot_stride + (keys % BLOCK_SIZE) * row_stride)[:, None] + dims[None, :]
        slots = load_slots(table, keys + KEYS, lowest, context, BLOCK_SIZE)
        if IS_MASKED:
            is_written = ((keys >= lowest) & (keys < context))[:, None] & (dims < HEAD_DIM)[None, :]
            key = tl.load(rows, mask=is_written, other=0.0)
            value = tl.load(rows + HEAD_DIM, mask=is_written, other=0.0)
        elif HEAD_DIM == DIMS:
            key = tl.load(rows)
            value = tl.load(rows + HEAD_DIM)
        else:
            key = tl.load(rows, mask=(dims < HEAD_DIM)[None, :], other=0.0)
            value = tl.load(rows + HEAD_DIM, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if HAS_SOFTCAP:
            scores = softcap * tanh(scores * (scale / softcap))
        if IS_MASKED:
            is_seen = keys[None, :] <= positions[:, None]
            if HAS_WINDOW:
                is_seen = is_seen & (keys[None, :] > positions[:, None] - window)
            scores = tl.where(is_seen, scores, UNSEEN)
        # A row that has seen nothing yet gathers weights of 1 here; its first real score fades them to 0.
        new_peak = tl.maximum(peak, tl.max(scores, 1) * unit)
        weights = tl.exp2(scores * unit - new_peak[:, None])
        fade = tl.exp2(peak - new_peak)
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(value.dtype), value, acc * fade[:, None], input_precision=PRECISION)
        peak = new_peak
    return acc, peak, total
