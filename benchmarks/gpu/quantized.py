"""Weights of 4 and 8 bits beside bfloat16: products of a layer, steps of the engine, and tiles."""

from collections.abc import Mapping
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.bounds import LLAMA_3_8B
from benchmarks.gpu.dummy import LLAMA_3_8B as LLAMA_3_8B_CONFIG
from benchmarks.gpu.dummy import write_model
from benchmarks.gpu.engine import asked, draw, engine_settings, full_steps, open_engine
from benchmarks.gpu.quantized_cases import make_weight, open_product
from benchmarks.gpu.timing import BF16, DEVICE, Timer, median_ms
from tiercel.engine.kernels.product_tiles import ProductTile
from tiercel.engine.offline import OfflineEngine

ROWS = (1, 64, 4096, 16, 512)  # the most informative ones first
SCHEMES = ("int4", "w8a8", "fp8", "fp8_blocks", "int8")
BATCHES = (1, 32, 256)
PROMPT, OUTPUT = 944, 64
CONFIGS: dict[str, dict[str, object]] = {  # `quantization_config` by the name of an engine
    "bf16": {},
    "int4": {
        "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    },
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
}  # fmt: skip
TILES = tuple(
    ProductTile(rows, columns, warps, stages)
    for rows, columns, warps, stages in (
        *((16, columns, 4, stages) for columns in (32, 64, 128) for stages in (3, 4, 5)),
        *((64, columns, 4, stages) for columns in (64, 128) for stages in (2, 3, 4)),
        *((128, columns, 8, stages) for columns in (64, 128) for stages in (2, 3)),
        (256, 64, 8, 2),
    )
)


def run(bench: Bench) -> None:
    """Record `step.SCHEME.batch_N.ratio`, `gemm.ROWS.SCHEME`, `tile.SCHEME.ROWS.best`."""
    base: dict[int, float] = {}
    for name in CONFIGS:
        if bench.has_time(f"steps {name}", 15.0):
            with bench.part(f"steps {name}"):
                base = steps(bench, name, base)
    for rows in ROWS[:3] if bench.is_quick else ROWS:
        for scheme in SCHEMES:
            if bench.has_time(f"gemm {rows} {scheme}", 2.0):
                with bench.part(f"gemm {rows} {scheme}"):
                    products(bench, scheme, rows, LLAMA_3_8B.linears)
    for scheme in SCHEMES[:1] if bench.is_quick else SCHEMES:
        for rows in (1, 64, 4096):
            if bench.has_time(f"tiles {scheme} {rows}", 2.0):
                with bench.part(f"tiles {scheme} {rows}"):
                    tiles(bench, scheme, rows, LLAMA_3_8B.linears["gate_up"])


def products(
    bench: Bench,
    scheme: str,
    rows: int,
    shapes: Mapping[str, tuple[int, int]],
    device: torch.device = DEVICE,
    timer: Timer = median_ms,
) -> None:
    """Measure the matrix products of a layer, and torch's with weights of bfloat16."""
    plain_ms, ms, read_bytes = 0.0, 0.0, 0
    for outputs, inputs in shapes.values():
        weight = torch.randn(outputs, inputs, device=device, dtype=BF16) * 0.02
        x = torch.randn(rows, inputs, device=device, dtype=BF16)
        layer = open_product(make_weight(scheme, weight), device)
        plain_ms += timer(lambda x=x, weight=weight: F.linear(x, weight))
        ms += timer(lambda x=x, layer=layer: layer.forward(x))
        read_bytes += layer.nbytes
    facts = {"us": 1e3 * ms, "bf16_us": 1e3 * plain_ms, "weights_tb_per_s": read_bytes / ms / 1e9}
    bench.record(f"gemm.{rows}.{scheme}", plain_ms / ms, "x bf16", **facts)


def tiles(
    bench: Bench,
    scheme: str,
    rows: int,
    shape: tuple[int, int],
    device: torch.device = DEVICE,
    timer: Timer = median_ms,
    candidates: tuple[ProductTile, ...] = TILES,
) -> None:
    """Measure a product with every tile that is not much larger than it has rows. A tile that cannot run is a failure
    of its own."""
    layer = open_product(make_weight(scheme, torch.randn(*shape, device=device) * 0.02), device)
    x = torch.randn(rows, shape[1], device=device, dtype=BF16)
    found: dict[ProductTile, float] = {}
    least = min(tile.rows for tile in candidates)
    for tile in candidates:
        if tile.rows <= max(rows, least):
            with bench.part(f"tile.{scheme}.{rows}.{tile.rows}x{tile.columns}_warps_{tile.warps}_stages_{tile.stages}"):
                found[tile] = timer(lambda tile=tile: layer.forward(x, tile))
    if found:
        best = min(found, key=lambda tile: found[tile])
        facts = {"rows": best.rows, "columns": best.columns, "warps": best.warps, "stages": best.stages}
        bench.record(f"tile.{scheme}.{rows}.best", 1e3 * found[best], "us", tried=len(found), **facts)


def steps(bench: Bench, name: str, base: Mapping[int, float]) -> dict[int, float]:
    """Measure steps in which a whole batch decodes. Return their milliseconds, or `base` if it has some."""
    flags = {"max_num_seqs": max(BATCHES), "max_num_batched_tokens": 8192, "max_model_len": 2048, "kv_host_size": "0"}
    model = write_quantized_model(bench.folder, LLAMA_3_8B_CONFIG, name)
    with open_engine(engine_settings(bench.folder, model=str(model), **flags)) as engine:
        engine.run(asked(draw(engine, max(BATCHES), 64, 16, seed=99)))  # compiles kernels and allocates memory
        found: dict[int, float] = {}
        for batch in BATCHES:
            if bench.has_time(f"{name} batch {batch}", 2.0):
                found[batch] = measure_steps(bench, engine, f"step.{name}.batch_{batch}", batch, base.get(batch))
    return dict(base) or found


def measure_steps(
    bench: Bench,
    engine: OfflineEngine,
    figure: str,
    batch: int,
    base_ms: float | None,
    prompt: int = PROMPT,
    output: int = OUTPUT,
) -> float:
    """Record the median step of a batch and, with `base_ms`, how much faster it is. Return milliseconds."""
    ran = engine.run(asked(draw(engine, batch, prompt, output, seed=batch)))
    times = [seconds for seconds, _ in full_steps(ran)]
    ms = 1e3 * median(times)
    bench.record(f"{figure}.step_ms", ms, "ms", steps=len(times))
    if base_ms is not None:
        bench.record(f"{figure}.ratio", base_ms / ms, "x bf16")
    return ms


def write_quantized_model(folder: Path, config: Mapping[str, object], name: str) -> Path:
    """Make the folder of a model whose checkpoint would be in a format of `CONFIGS`."""
    given = CONFIGS[name]
    return write_model(folder / f"quantized-{name}", {**config, **({"quantization_config": given} if given else {})})
