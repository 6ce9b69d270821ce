"""Bandwidth by memory layout, block size and tile: the basis of the arena layout and the tile table.

The arena is as large as the one of a serving engine, and blocks lie anywhere in it, because the device keeps the
translations of few addresses. One layer of a block-first arena has a piece in every block, so it touches all pages of
the arena; layer-first, it lies in one piece of a 32nd of the arena.
"""

from statistics import geometric_mean

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.bounds import LLAMA_3_8B
from benchmarks.gpu.kernels import processors
from benchmarks.gpu.pool import Pool, arena_tokens, causal_flop, free_bytes, read_bytes
from benchmarks.gpu.timing import DEVICE, Timer, median_ms
from tiercel.engine.attention.triton import TritonAttention
from tiercel.engine.kernels.tiles import DecodeForm, Tile, choose_form

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
        (64, 64, 4, 2),  # two programs at a time on a processor: 80 KiB of shared memory each
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
FORMS = {
    DecodeForm(): "plain",
    DecodeForm(folds_merge=True): "folded",
    DecodeForm(starts_early=True): "early",
    DecodeForm(folds_merge=True, starts_early=True): "folded_early",
}


def run(bench: Bench) -> None:
    """Record the figures `arena`, `FIRST.BLOCK_SIZE.few|many`, `form.*`, `decode_tile.*`, `prefill_tile.*`, and the
    best of the last three."""
    pool = Pool(LLAMA_3_8B, arena_tokens(LLAMA_3_8B, LAYERS, BATCH * CONTEXT + 4096, free_bytes()), LAYERS)
    bench.record("arena", pool.gb, "GB", layers=LAYERS)
    many, few = [(CONTEXT - 1, 1)] * BATCH, [(LONG - 1, 1)] * FEW
    for block_size in BLOCK_SIZES[:2] if bench.is_quick else BLOCK_SIZES:
        for first in ("block", "layer"):
            for name, slices in (("many", many), ("few", few)):
                part = f"{first}_first.{block_size}.{name}"
                if bench.has_time(part, 1.0):
                    with bench.part(part):
                        rate, us = decode(pool, slices, block_size, is_block_first=first == "block")
                        bench.record(part, rate, "TB/s", us=us, arena_gb=pool.gb)
    if bench.has_time("narrow", 1.0):
        with bench.part("narrow"):
            rate, us = decode(pool, many, BLOCK_SIZES[0], is_narrow=True)
            bench.record(f"block_first.{BLOCK_SIZES[0]}.many_narrow", rate, "TB/s", us=us)
    forms(bench, pool, {"many": many, "few": few, "one": [(CONTEXT - 1, 1)], "one_long": [(131_071, 1)]})
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


def forms(bench: Bench, pool: Pool, slices_by_name: dict[str, list[tuple[int, int]]], timer: Timer = median_ms) -> None:
    """Record `form.FORM.NAME` for every form of the decode kernel, and the form with the best geometric mean."""
    means: dict[str, float] = {}
    capability = torch.cuda.get_device_capability() if pool.place.type == "cuda" else None
    for form, name in FORMS.items():
        if choose_form(capability, form) != form:
            continue
        backend = TritonAttention(processors(pool.place), form=form)
        found: list[float] = []
        for kind, slices in slices_by_name.items():
            if not bench.has_time(f"form.{name}.{kind}", 1.0):
                continue
            with bench.part(f"form.{name}.{kind}"):
                rate, us = decode(pool, slices, BLOCK_SIZES[0], backend, timer=timer)
                bench.record(f"form.{name}.{kind}", rate, "TB/s", us=us)
                found.append(rate)
        if len(found) == len(slices_by_name):
            means[name] = geometric_mean(found)
    if means:
        best = max(means, key=lambda name: means[name])
        bench.record("form_best", means[best] / means.get("plain", means[best]), "x of plain", form=best)


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
    is_narrow: bool = False,
    timer: Timer = median_ms,
) -> tuple[float, float]:
    """Return TB/s and the microseconds of one layer."""
    backend = backend or TritonAttention(processors(pool.place))
    state = pool.state(slices, block_size, is_narrow=is_narrow)
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
