"""Attention of one layer: bytes per second of decodes and operations per second of prefills, for each backend."""

from collections.abc import Sequence

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.bounds import COPY_BYTES_PER_S, LLAMA_3_8B
from benchmarks.gpu.kernels import open_fa3, processors
from benchmarks.gpu.pool import Pool, arena_tokens, causal_flop, free_bytes, read_bytes
from benchmarks.gpu.timing import DEVICE, Timer, median_ms
from tiercel.engine.attention.base import Attention, PagedReader
from tiercel.engine.attention.triton import TritonAttention
from tiercel.engine.kernels.paged_partition import partition_contexts
from tiercel.engine.kernels.tiles import DECODE_TILES, choose_shares, choose_tile

LAYERS = 8
BLOCK_SIZE = 16
DECODES = ((256, 1024), (32, 1024), (1, 1024), (32, 4096), (1, 4096), (256, 4096))
PREFILLS = ((8, 1024), (2, 4096), (4, 2048), (1, 8192))
CHUNK = (2048, 2048)  # tokens before, tokens of the chunk
MIXED = (256, 1024)  # decodes beside the chunk, and their context
FACTORS = (0.25, 0.5, 1.0, 1.5, 2.0)  # of the number of shares of a decode
UNEVEN = (*[1024] * 95, 131_072)  # contexts of one decode
FEW = (16_384,) * 4
_SPARE = 4096  # tokens


def run(bench: Bench) -> None:
    """Figures `arena`, `BACKEND.decode.BATCH_CONTEXT`, `BACKEND.decode.uneven` and, of as many contexts with the same
    total, `BACKEND.decode.even`, `BACKEND.prefill.BATCH_LENGTH`, `BACKEND.chunk`, `BACKEND.mixed`;
    `triton.partition.BATCH`, and by the number of shares, `shares_SHARES.uneven` and `shares_SHARES.few`.
    """
    most = max(batch * context for batch, context in DECODES)
    pool = Pool(LLAMA_3_8B, arena_tokens(LLAMA_3_8B, LAYERS, most + _SPARE, free_bytes()), LAYERS)
    bench.record("arena", pool.gb, "GB", layers=LAYERS)
    copy = bench.earlier("limits.copy")
    limit = COPY_BYTES_PER_S if copy is None else copy * 1e12
    backends: dict[str, Attention] = {"triton": TritonAttention(processors(DEVICE))}
    with bench.part("fa3"):
        backends |= open_fa3()
    shapes: list[tuple[str, list[tuple[int, int]]]] = []
    shapes += [(f"decode.{batch}_{context}", [(context - 1, 1)] * batch) for batch, context in DECODES]
    shapes[1:1] = [("decode.uneven", singles(UNEVEN)), ("decode.even", singles(level(UNEVEN)))]
    shapes += [(f"prefill.{batch}_{length}", [(0, length)] * batch) for batch, length in PREFILLS]
    shapes += [("chunk", [CHUNK]), ("mixed", [CHUNK, *[(MIXED[1] - 1, 1)] * MIXED[0]])]
    for name, backend in backends.items():
        for shape, slices in shapes:
            if bench.has_time(f"{name} {shape}", 1.0):
                with bench.part(f"{name} {shape}"):
                    measure(bench, pool, backend, f"{name}.{shape}", slices, limit)
    with bench.part("triton partition"):
        for slices in (singles(UNEVEN), singles((1024,) * 512)):
            measure_partition(bench, pool, slices)
    for share in FACTORS:
        count = round(share * processors(DEVICE))
        name = f"shares_{choose_shares(pool.model.kv_heads, count)}"
        for kind, contexts in (("uneven", UNEVEN), ("few", FEW)):
            if bench.has_time(f"{name} {kind}", 1.0):
                with bench.part(f"{name} {kind}"):
                    measure(bench, pool, TritonAttention(count), f"{name}.{kind}", singles(contexts), limit)


def singles(contexts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the slices of a decode."""
    return [(context - 1, 1) for context in contexts]


def level(contexts: Sequence[int]) -> list[int]:
    """Return the same number of contexts with the same total, which differ by one token at most."""
    least, more = divmod(sum(contexts), len(contexts))
    return [least + (index < more) for index in range(len(contexts))]


def measure(
    bench: Bench,
    pool: Pool,
    backend: Attention,
    name: str,
    slices: list[tuple[int, int]],
    bytes_per_s: float,
    timer: Timer = median_ms,
) -> None:
    """Return a job: attention of a step in one layer, after the first layer has cut the contexts."""
    assert isinstance(backend, PagedReader)
    state = pool.state(slices, BLOCK_SIZE)
    query, kv, params = pool.queries(state), pool.layer(BLOCK_SIZE), pool.params
    with torch.inference_mode():
        ms = timer(lambda: backend.read(query, kv, state, params))
    if state.is_decode:
        rate = read_bytes(pool.model, slices) / ms / 1e9
        bench.record(name, rate, "TB/s", us=1e3 * ms, share=rate * 1e12 / bytes_per_s, arena_gb=pool.gb)
    else:
        bench.record(name, causal_flop(pool.model, slices) / ms / 1e9, "TFLOP/s", us=1e3 * ms)


def measure_partition(bench: Bench, pool: Pool, slices: list[tuple[int, int]], timer: Timer = median_ms) -> None:
    """Measure the time of cutting the contexts, once per step for all layers."""
    state, model = pool.state(slices, BLOCK_SIZE), pool.model
    tile = choose_tile(DECODE_TILES, model.head_dim, pool.dtype)
    shares = choose_shares(model.kv_heads, processors(pool.place))
    ms = timer(lambda: partition_contexts(state, None, shares, tile, model.kv_heads))
    bench.record(f"triton.partition.{len(slices)}", 1e3 * ms, "us", shares=shares)
