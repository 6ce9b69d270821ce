"""The limits of the device: matrix products of the model's shapes, in each way that the engine has, and a copy."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.bounds import COPY_BYTES_PER_S, GEMM_FLOP_PER_S, LLAMA_3_8B
from benchmarks.gpu.timing import BF16, DEVICE, median_ms
from tiercel.engine.measure.dense_choice import LEAST_CAPABILITY
from tiercel.engine.models.dense_routes import DEFAULT, ROUTED_ROWS, DenseProduct, open_products

ROWS = (1, 4096, 256, 32, 8192, 64, 1024, 128, 512, 2048)  # the most informative ones first
QUICK_ROWS = (1, 64, 512, 4096)
QUICK_ROUTED = (128, 256, 512)
COPY_BYTES = 1 << 32
MAX_HEAD_ROWS = 1024  # more never sample at once


def run(bench: Bench) -> None:
    """Record `copy`, `gemm.ROWS` (all products of a layer and their share), `gemm.ROWS.NAME`, `route.ROWS.NAME.WAY`."""
    with bench.part("copy"):
        copy(bench)
    for rows in QUICK_ROWS if bench.is_quick else ROWS:
        if not bench.has_time(f"gemm {rows}", 1.0):
            continue
        with bench.part(f"gemm {rows}"):
            products(bench, rows)
    if torch.cuda.get_device_capability() < LEAST_CAPABILITY:
        return
    ways = open_products(torch.cuda.get_device_properties().multi_processor_count)
    shapes = LLAMA_3_8B.linears | {"head": (LLAMA_3_8B.vocab, LLAMA_3_8B.hidden)}
    for rows in QUICK_ROUTED if bench.is_quick else ROUTED_ROWS:
        for name, shape in shapes.items():
            if bench.has_time(f"route {rows} {name}", 1.0):
                routes(bench, rows, name, shape, ways)


def routes(
    bench: Bench,
    rows: int,
    name: str,
    shape: tuple[int, int],
    ways: Mapping[str, DenseProduct],
    place: torch.device = DEVICE,
    timer: Callable[[Callable[[], object], int], float] = median_ms,
) -> None:
    """Record `route.ROWS.NAME.WAY` for each way but the default: the time of the default over that of the way."""
    outputs, inputs = shape
    weight = torch.randn(outputs, inputs, device=place, dtype=BF16) * 0.02
    x = torch.randn(rows, inputs, device=place, dtype=BF16)
    default_ms = timer(lambda: ways[DEFAULT](x, weight, None), 20)
    for way, product in ways.items():
        if way == DEFAULT:
            continue
        with bench.part(f"route {rows} {name} {way}"):
            ms = timer(lambda product=product: product(x, weight, None), 20)
            bench.record(f"route.{rows}.{name}.{way}", default_ms / ms, "x", us=1e3 * ms, default_us=1e3 * default_ms)


def copy(bench: Bench) -> None:
    """Return bytes read and written per second."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    ms = median_ms(lambda: target.copy_(source))
    rate = 2 * COPY_BYTES / ms / 1e9
    bench.record("copy", rate, "TB/s", share_of_bound=rate * 1e12 / COPY_BYTES_PER_S)


def products(bench: Bench, rows: int) -> None:
    """Measure each matrix product of the model with this number of rows."""
    shapes = dict(LLAMA_3_8B.linears)
    if rows <= MAX_HEAD_ROWS:
        shapes["head"] = (LLAMA_3_8B.vocab, LLAMA_3_8B.hidden)
    layer_ms, layer_flop = 0.0, 0
    for name, (outputs, inputs) in shapes.items():
        weight = torch.randn(outputs, inputs, device=DEVICE, dtype=BF16) * 0.02
        x = torch.randn(rows, inputs, device=DEVICE, dtype=BF16)
        ms = median_ms(lambda x=x, weight=weight: F.linear(x, weight), 30)
        flop, read_bytes = 2 * rows * outputs * inputs, 2 * outputs * inputs
        bench.record(
            f"gemm.{rows}.{name}", flop / ms / 1e9, "TFLOP/s", us=1e3 * ms, weights_tb_per_s=read_bytes / ms / 1e9
        )
        if name != "head":
            layer_ms += ms
            layer_flop += flop
    bound_ms = 1e3 * max(layer_flop / GEMM_FLOP_PER_S, layer_flop / rows / COPY_BYTES_PER_S)
    bench.record(
        f"gemm.{rows}", layer_flop / layer_ms / 1e9, "TFLOP/s", layer_us=1e3 * layer_ms, share=bound_ms / layer_ms
    )
