"""Tile sizes of the attention kernels: one table, so that a start never waits for tuning.

Chosen from shared memory, registers and the tensor cores' shapes of a Hopper GPU, not yet measured on one: a table of
other tiles is passed to `engine.attention.paged.TritonAttention`.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program of an attention kernel holds at a time."""

    rows: int  # of queries, tokens times the heads of a group: a power of two, at least 16
    keys: int  # a power of two, at least 16
    warps: int
    stages: int  # tiles of keys and values on their way into shared memory


# By (head_dim rounded up to a power of two, bytes an element); the next larger head_dim stands for one between two.
PREFILL_TILES = {
    (64, 2): Tile(rows=128, keys=64, warps=4, stages=3),
    (128, 2): Tile(rows=128, keys=64, warps=8, stages=3),
    (256, 2): Tile(rows=128, keys=32, warps=8, stages=3),
    (64, 4): Tile(rows=32, keys=16, warps=4, stages=2),
    (128, 4): Tile(rows=16, keys=16, warps=4, stages=2),
    (256, 4): Tile(rows=16, keys=16, warps=4, stages=2),
}
DECODE_TILES = {
    (64, 2): Tile(rows=16, keys=128, warps=4, stages=3),
    (128, 2): Tile(rows=16, keys=64, warps=4, stages=3),
    (256, 2): Tile(rows=16, keys=32, warps=4, stages=3),
    (64, 4): Tile(rows=16, keys=64, warps=4, stages=2),
    (128, 4): Tile(rows=16, keys=32, warps=8, stages=2),
    (256, 4): Tile(rows=16, keys=16, warps=4, stages=2),
}
_LEAST = Tile(rows=16, keys=16, warps=4, stages=1)

MOST_SHARES = 256  # a power of two: of the parts of one sequence as many are merged
_PROGRAMS_PER_PROCESSOR = 8  # two at a time, four times over: the last parts then end near each other


def choose_tile(table: dict[tuple[int, int], Tile], head_dim: int, dtype: torch.dtype) -> Tile:
    """The tile for heads of this size; the smallest that there is for heads larger than any in the table."""
    sizes = sorted(size for size, itemsize in table if itemsize == dtype.itemsize and size >= head_dim)
    return table[sizes[0], dtype.itemsize] if sizes else _LEAST


def choose_shares(kv_heads: int, processors: int) -> int:
    """Into how many parts a decode cuts all its contexts together, beyond one for each sequence: so many that all
    processors have work until the end.

    It depends on shapes only, never on the lengths of contexts: a CUDA graph holds the launch.
    """
    return max(1, min(MOST_SHARES, round(_PROGRAMS_PER_PROCESSOR * processors / kv_heads)))
