"""Tile sizes of the attention kernels, as a table, so that no start waits for tuning.

They are chosen from the shared memory, the registers and the shapes of the tensor cores of a Hopper GPU, and not yet
measured. Other tiles can be passed to `engine.attention.triton.TritonAttention`.
"""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of queries and keys that one program of an attention kernel holds at a time."""

    rows: int  # query rows (tokens times the heads of a group): a power of two, at least 16
    keys: int  # a power of two, at least 16
    warps: int
    stages: int  # tiles of keys and values that are loaded into shared memory ahead


# By (head_dim, bytes per element); a head_dim between two entries uses the next larger one.
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
_SMALLEST = Tile(rows=16, keys=16, warps=4, stages=1)

MAX_SHARES = 256  # a power of two: the largest number of parts of one sequence that can be merged
_PROGRAMS_PER_PROCESSOR = 8  # two at a time, four times in a row, so that the last parts end at nearly the same time


@dataclass(frozen=True, slots=True)
class DecodeForm:
    """The form of a decode's launch. Both parts are off until a device has been measured.

    folds_merge:  the program that ends last among those of a context and key head merges the parts, instead of a
                  second kernel
    starts_early: the kernels of a decode may be launched while the kernel before them ends (programmatic dependent
                  launch), from compute capability 9.0 on
    """

    folds_merge: bool = False
    starts_early: bool = False


DECODE_FORM = DecodeForm()
_EARLY_CAPABILITY = (9, 0)


def choose_tile(table: dict[tuple[int, int], Tile], head_dim: int, dtype: torch.dtype) -> Tile:
    """Return the tile for heads of this size; for larger heads than in the table, the smallest tile."""
    sizes = sorted(size for size, itemsize in table if itemsize == dtype.itemsize and size >= head_dim)
    return table[sizes[0], dtype.itemsize] if sizes else _SMALLEST


def choose_form(capability: tuple[int, int] | None, form: DecodeForm = DECODE_FORM) -> DecodeForm:
    """Return the form without what a device of this CUDA compute capability cannot do."""
    can_start_early = capability is not None and capability >= _EARLY_CAPABILITY
    return replace(form, starts_early=form.starts_early and can_start_early)


def with_room_to_widen(tile: Tile) -> Tile:
    """Return the tile for a prefill over a cache of 8 bits, whose widened numbers would not fit the registers of four
    warps."""
    return replace(tile, warps=max(tile.warps, 8))


def choose_shares(kv_heads: int, processors: int) -> int:
    """Return the number of parts of all contexts of a decode, beyond one part per sequence.

    It is large enough to occupy all processors until the end. It depends on shapes only and not on the lengths of
    contexts, because a CUDA graph holds the launch.
    """
    return max(1, min(MAX_SHARES, round(_PROGRAMS_PER_PROCESSOR * processors / kv_heads)))
