"""Bandwidth by memory layout, block size and tile: the basis of the arena layout and the tile table."""

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.bounds import LLAMA_3_8B
from benchmarks.gpu.kernels import processors
from benchmarks.gpu.pool import Pool, causal_flop, read_bytes
from benchmarks.gpu.timing import DEVICE, Timer, median_ms
from tiercel.engine.attention.triton import TritonAttention
from tiercel.engine.kernels.tiles import Tile

BATCH, CONTEXT = 256, 1024
FEW, LONG = 16, 16_384
LAYERS = 32  # the strides are those of the real arena
BLOCK_SIZES = (16, 64, 32, 128)
PREFILL = [(0, 2048)] * 4
DECODE_TILES = tuple(
    Tile(rows=16, keys=keys, warps=warps, stages=stages)
    for warps, stages, keys in (
        *((4, 3, keys) for keys in (64, 128, 32)),
        *((4, 4, keys) for keys in (64, 128, 32)),
        *((4, 2, keys) for keys in (64, 128)),
        *((8, 3, keys) for keys in (64, 128)),
        *((2, 4, keys) for keys in (32, 64)),
    )
)
PREFILL_TILES = tuple(
    Tile(rows=rows, keys=keys, warps=warps, stages=stages)
    for rows, keys, warps, stages in (
        (128, 64, 8, 3),
        (128, 64, 8, 2),
        (128, 128, 8, 2),
        (128, 64, 4, 3),
        (64, 64, 4, 3),
        (64, 128, 4, 2),
        (128, 32, 8, 3),
        (128, 32, 4, 4),
    )
)


def run(bench: Bench) -> None:
    """Record the figures `FIRST.BLOCK_SIZE.few|many`, `decode_tile.*`, `prefill_tile.*`, and the best of both."""
    tokens = BATCH * CONTEXT + 4096
    pool = Pool(LLAMA_3_8B, tokens, LAYERS)
    many, few = [(CONTEXT - 1, 1)] * BATCH, [(LONG - 1, 1)] * FEW
    for block_size in BLOCK_SIZES[:2] if bench.is_quick else BLOCK_SIZES:
        for first in ("block", "layer"):
            for name, slices in (("many", many), ("few", few)):
                part = f"{first}_first.{block_size}.{name}"
                if bench.has_time(part, 1.0):
                    with bench.part(part):
                        rate, us = decode(pool, slices, block_size, is_block_first=first == "block")
                        bench.record(part, rate, "TB/s", us=us)
    count = processors(DEVICE)
    best: dict[str, tuple[float, Tile]] = {}
    for kind, tile in alternate(DECODE_TILES, PREFILL_TILES):
        name = f"{kind}_tile.{tile.rows}x{tile.keys}_warps_{tile.warps}_stages_{tile.stages}"
        if not bench.has_time(name, 3.0):
            continue
        with bench.part(name):
            if kind == "decode":
                rate, us = decode(pool, many, BLOCK_SIZES[0], TritonAttention(count, decode_tile=tile))
            else:
                rate, us = prefill(pool, TritonAttention(count, prefill_tile=tile))
            bench.record(name, rate, "TB/s" if kind == "decode" else "TFLOP/s", us=us)
            best[kind] = max(best.get(kind, (0.0, tile)), (rate, tile), key=lambda pair: pair[0])
    for kind, (rate, tile) in best.items():
        facts = {"rows": tile.rows, "keys": tile.keys, "warps": tile.warps, "stages": tile.stages}
        bench.record(f"{kind}_tile_best", rate, "TB/s" if kind == "decode" else "TFLOP/s", **facts)


def alternate(decode_tiles: tuple[Tile, ...], prefill_tiles: tuple[Tile, ...]) -> list[tuple[str, Tile]]:
    """Interleave both lists, so that an exhausted budget has tried some of each."""
    kinds = [("decode", at, tile) for at, tile in enumerate(decode_tiles)]
    kinds += [("prefill", at, tile) for at, tile in enumerate(prefill_tiles)]
    return [(kind, tile) for kind, _, tile in sorted(kinds, key=lambda one: one[1])]


def decode(
    pool: Pool,
    slices: list[tuple[int, int]],
    block_size: int,
    backend: TritonAttention | None = None,
    *,
    is_block_first: bool = True,
    timer: Timer = median_ms,
) -> tuple[float, float]:
    """Return TB/s and the microseconds of one layer."""
    backend = backend or TritonAttention(processors(pool.place))
    state = pool.state(slices, block_size)
    query, kv, params = pool.queries(state), pool.layer(block_size, is_block_first=is_block_first), pool.params
    with torch.inference_mode():
        ms = timer(lambda: backend.read(query, kv, state, params))
    return read_bytes(pool.model, slices) / ms / 1e9, 1e3 * ms


def prefill(
    pool: Pool, backend: TritonAttention, slices: list[tuple[int, int]] = PREFILL, timer: Timer = median_ms
) -> tuple[float, float]:
    """Return TFLOP/s and the microseconds of one layer."""
    state = pool.state(slices, BLOCK_SIZES[0])
    query, kv, params = pool.queries(state), pool.layer(BLOCK_SIZES[0]), pool.params
    with torch.inference_mode():
        ms = timer(lambda: backend.read(query, kv, state, params))
    return causal_flop(pool.model, slices) / ms / 1e9, 1e3 * ms
