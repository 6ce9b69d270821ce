"""The gain of overlapping two parts of a step: as the engine does it, and of one layer on disjoint processors.

Built: decodes in graphs and larger steps as two halves on two plain streams, through the engine's code, with some
layers of the model. This decides whether `tiercel calibrate` is worth running for a model.

Not built: two kinds of overlap on one layer, both on two plain streams and on disjoint processors (see `green`).
Halves: the decode attention of one half-batch overlaps with the products of the other, twice per layer, compared with
the whole batch without overlap. Prefill: a chunk of a prompt overlaps with decodes, compared with one mixed step. CUDA
graphs of some layers are compared, or plain launches if the machine cannot record them.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.bounds import LLAMA_3_8B
from benchmarks.gpu.dummy import LLAMA_3_8B as LLAMA_FIELDS
from benchmarks.gpu.dummy import write_model
from benchmarks.gpu.green import SplitDevice, splits
from benchmarks.gpu.kernels import processors
from benchmarks.gpu.pool import Pool
from benchmarks.gpu.timing import DEVICE, captured, elapsed_ms
from tiercel.device.registry import open_device
from tiercel.engine.attention.registry import open_attention
from tiercel.engine.attention.triton import TritonAttention
from tiercel.engine.measure.decode_choice import measure_decodes
from tiercel.engine.measure.dense_choice import route_products
from tiercel.engine.measure.overlap_search import OverlapBench
from tiercel.engine.models.base import kv_spec
from tiercel.engine.models.decoder import Decoder
from tiercel.engine.models.registry import load_model
from tiercel.settings.settings import EngineSettings
from tiercel.values.clock import MonotonicClock
from tiercel.values.errors import DeviceError

CONTEXT = 1280  # tokens of a decode: the middle of an answer of 512 tokens after a prompt of 1,024
HALVES = ((512, 768), (512, 2048), (256, 256), (512, 1024))  # decodes, tokens of the step
QUICK_HALVES = ((512, 768),)
BUILT = ((512, 512), (256, 256), (512, 768), (256, 1024), (512, 1024), (512, 2048))  # decodes, tokens of the step
PREFILLS = ((256, 2048), (512, 1024))  # decodes, tokens of the chunk
BLOCK_SIZE = 16
SLOTS = 8  # layers of one graph
LAYERS = 4

Job = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two overlapping jobs of a layer: `memory` on the smaller part of the device, `products` on the larger."""

    memory: Job
    products: Job


class Layer:
    """The weights and the jobs of one layer."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._weights = [
            torch.randn(outputs, inputs, device=pool.place, dtype=pool.dtype) * 0.02
            for outputs, inputs in pool.model.linears.values()
        ]

    def products(self, rows: int) -> Job:
        """Return a job: the four matrix products of this number of tokens."""
        inputs: dict[int, Tensor] = {
            weight.shape[1]: torch.randn(rows, weight.shape[1], device=weight.device, dtype=weight.dtype)
            for weight in self._weights
        }
        return lambda: [F.linear(inputs[weight.shape[1]], weight) for weight in self._weights]

    def attention(self, slices: list[tuple[int, int]], count: int) -> Job:
        """Return a job: attention of these sequences, launched for `count` processors."""
        pool, backend = self._pool, TritonAttention(count)
        state = pool.state(slices, BLOCK_SIZE)
        query, kv, params = pool.queries(state), pool.layer(BLOCK_SIZE), pool.params
        return lambda: backend.read(query, kv, state, params)


def run(bench: Bench) -> None:
    """Figures `built.DECODES_TOKENS`, `halves.DECODES_TOKENS.SPLIT`, `prefill.DECODES_TOKENS.SPLIT`, and the best.

    All are serial over overlapped.
    """
    with bench.part("built"):
        measure_built(bench, open_built(bench.folder), BUILT[::2] if bench.is_quick else BUILT)
    torch.cuda.empty_cache()
    count = processors(DEVICE)
    most = max(decodes for decodes, _ in HALVES + PREFILLS) * CONTEXT
    layer = Layer(Pool(LLAMA_3_8B, most + 2 * 4096, LAYERS))
    with torch.inference_mode():
        for decodes, tokens in QUICK_HALVES if bench.is_quick else HALVES:
            decode = [(CONTEXT - 1, 1)] * decodes
            serial = in_turns([layer.products(tokens), layer.attention(decode, count)])

            def halves(size: int, decode: list[tuple[int, int]] = decode, tokens: int = tokens) -> list[Pair]:
                memory = layer.attention(decode[: len(decode) // 2], size)
                return [Pair(memory, layer.products(tokens // 2))] * 2

            compare(bench, f"halves.{decodes}_{tokens}", serial, halves, count)
        for decodes, tokens in PREFILLS[:1] if bench.is_quick else PREFILLS:
            decode, chunk = [(CONTEXT - 1, 1)] * decodes, [(0, tokens)]
            together = [
                layer.products(decodes + tokens), layer.attention(decode, count), layer.attention(chunk, count)
            ]  # fmt: skip

            def apart(
                size: int, decode: list[tuple[int, int]] = decode, chunk: list[tuple[int, int]] = chunk
            ) -> list[Pair]:
                memory = in_turns([layer.products(len(decode)), layer.attention(decode, size)])
                work = in_turns([layer.products(chunk[0][1]), layer.attention(chunk, count - size or count)])
                return [Pair(memory, work)]

            compare(bench, f"prefill.{decodes}_{tokens}", in_turns(together), apart, count)
    for kind in ("halves", "prefill"):
        record_best(bench, kind)


def record_best(bench: Bench, kind: str) -> None:
    """Record the best of the figures of a kind, if there are any."""
    found = [figure for figure in bench.result.figures if figure.name.startswith(f"overlap.{kind}.")]
    if found:
        best = max(found, key=lambda figure: figure.value)
        bench.record(f"{kind}_best", best.value, "x", at=best.name.removeprefix("overlap."))


def open_built(folder: Path) -> OverlapBench:
    """Open trial steps of some layers of Llama-3-8B with random weights, as `tiercel calibrate` runs them."""
    model = write_model(folder / "overlap-model", {**LLAMA_FIELDS, "num_hidden_layers": LAYERS})
    settings = EngineSettings(model=str(model), device="cuda", load_format="dummy")
    device = open_device("cuda")
    fork = device.open_fork()
    assert fork is not None
    attention = open_attention(settings.attention_backend, DEVICE, device.processors, device.capability)
    loaded = load_model(settings, DEVICE, attention)
    assert isinstance(loaded, Decoder)
    route_products(settings, loaded, device)
    spec = kv_spec(loaded, settings.block_size)
    slots = max(decodes for decodes, _ in BUILT) * -(-CONTEXT // settings.block_size)
    lane, clock = device.open_lane(), MonotonicClock()
    trial = OverlapBench(loaded, spec, slots, device, fork, lane, clock)
    device.give_back_cached()  # this also waits for the zeroing of the arena, which was not queued on the lane
    rows = max(decodes for decodes, _ in BUILT)
    measure_decodes(*(attention, loaded, trial.kv, settings.block_size, device, lane, clock, rows), has_graphs=True)
    return trial


def measure_built(bench: Bench, trial: OverlapBench, shapes: Sequence[tuple[int, int]]) -> None:
    """Measure the gain of steps of (decodes, tokens) as halves, and record the best."""
    for decodes, tokens in shapes:
        part = f"built.{decodes}_{tokens}"
        if bench.has_time(part, 1.0):
            with bench.part(part):
                bench.record(part, trial.gain(tokens, decodes), "x", layers=LAYERS)
    record_best(bench, "built")


def compare(bench: Bench, name: str, serial: Job, pairs: Callable[[int], list[Pair]], count: int) -> None:
    """Measure one shape: the serial layer, then every split."""
    if not bench.has_time(name, 3.0):
        return
    with bench.part(name):
        serial_ms, how = layer_ms(serial)
        for size in (0, *(splits(count)[1::2] if bench.is_quick else splits(count))):
            part = f"{name}.{f'{size}_sm' if size else 'streams'}"
            if not bench.has_time(part, 1.0):
                continue
            with bench.part(part):
                measured(bench, part, serial_ms, how, pairs, size, count)


def measured(
    bench: Bench, part: str, serial_ms: float, how: str, pairs: Callable[[int], list[Pair]], size: int, count: int
) -> None:
    """Measure one split. `size` 0 means two plain streams."""
    with SplitDevice(size) if size else nullcontext() as split:
        if split is None:
            memory, products, sizes = torch.cuda.Stream(), torch.cuda.Stream(), (count, count)
        else:
            memory, products, sizes = split.first, split.second, split.sizes
        ms, ours = layer_ms(beside(pairs(sizes[0]), memory, products))
    facts = {"serial_us": 1e3 * serial_ms, "overlapped_us": 1e3 * ms, "launched_as": f"{how}/{ours}"}
    bench.record(part, serial_ms / ms, "x", memory_sm=sizes[0], products_sm=sizes[1], **facts)


def in_turns(jobs: list[Job]) -> Job:
    """Return a job that runs the jobs one after the other."""
    return lambda: [job() for job in jobs]


def beside(pairs: list[Pair], memory: torch.cuda.Stream, products: torch.cuda.Stream) -> Job:
    """Return a job that runs each pair on the two streams; the next pair begins when both have ended."""

    def job() -> None:
        current = torch.cuda.current_stream()
        for pair in pairs:
            for stream, work in ((memory, pair.memory), (products, pair.products)):
                stream.wait_stream(current)
                with torch.cuda.stream(stream):
                    work()
            current.wait_stream(memory)
            current.wait_stream(products)

    return job


def layer_ms(job: Job) -> tuple[float, str]:
    """Return the milliseconds of one layer, and the kind of launch: graph or plain."""

    def layers() -> None:
        for _ in range(SLOTS):
            job()

    try:
        return elapsed_ms(captured(layers)) / SLOTS, "graph"
    except DeviceError as exc:
        print(f"  no graph: {str(exc).splitlines()[0][:120]}", flush=True)
        torch.cuda.synchronize()
        return elapsed_ms(layers) / SLOTS, "plain"
