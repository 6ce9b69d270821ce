"""Tile sizes of products with quantised weights, as a table, so that no start waits for tuning.

They are chosen from the shared memory and the shapes of the tensor cores of a Hopper GPU, and not yet measured.
`python benchmarks/gpu/run.py --sections quantized` measures other ones.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProductTile:
    """The outputs that one program computes. rows and columns: powers of two, at least 16."""

    rows: int
    columns: int
    warps: int
    stages: int  # steps along the inputs whose operands are loaded ahead


# By the largest number of rows, in ascending order; more rows use the last tile several times.
PRODUCT_TILES = (
    ProductTile(rows=16, columns=64, warps=4, stages=4),
    ProductTile(rows=64, columns=64, warps=4, stages=3),
    ProductTile(rows=128, columns=64, warps=8, stages=3),  # 128 columns would spill registers beside groups
)
WIDE_TILES = (  # of activations of 32 bits
    ProductTile(rows=16, columns=64, warps=4, stages=3),
    ProductTile(rows=64, columns=64, warps=4, stages=2),
)

MAX_SPLITS = 16
_PROGRAMS_PER_PROCESSOR = 2  # at the same time
_LEAST_STEPS = 4  # along the inputs, of a program


def choose_product_tile(rows: int, itemsize: int) -> ProductTile:
    """Return the tile for this number of rows of activations of `itemsize` bytes."""
    table = PRODUCT_TILES if itemsize < 4 else WIDE_TILES
    return next((tile for tile in table if rows <= tile.rows), table[-1])


def choose_splits(rows: int, tile: ProductTile, outputs: int, steps: int, processors: int) -> int:
    """Return into how many parts the inputs are cut, so that few rows occupy all processors.

    It depends on the tile and on the weight alone; where rows have several tiles it is 1. `steps`: along the inputs.
    """
    if rows > tile.rows:
        return 1
    wanted = _PROGRAMS_PER_PROCESSOR * processors // -(-outputs // tile.columns)
    return max(1, min(MAX_SPLITS, wanted, steps // _LEAST_STEPS))
