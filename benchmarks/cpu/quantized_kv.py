"""Decode attention over KV in 8 bits beside bfloat16, in the native kernels, with an exit code for the promises.

    python benchmarks/cpu/quantized_kv.py [--threads N] [--only SHAPE,...] [--json] [--control]

For each shape of a model and each context, one layer's decode attention of 16 sequences is timed over caches in
bfloat16, int8 and fp8, in turns, with KV that comes from memory. A ratio is the median over the turns. The exit code is
1 if a block is larger than 0.53 times one in bfloat16, or if int8 takes longer than bfloat16 at the longest context.
--control reads the 8 bits by torch, where the second promise must be broken.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass

import torch

from benchmarks.cpu.processor import read_processor
from tiercel.engine.attention.base import PagedReader
from tiercel.engine.attention.cache_rows import write_rows
from tiercel.engine.attention.grouped import GroupedAttention
from tiercel.engine.attention.native import NativeAttention
from tiercel.engine.forward.kv_cache import width_of
from tiercel.engine.forward.state import AttentionParams, ForwardState
from tiercel.engine.models.precision import CpuProducts, dtype_name
from tiercel.engine.native.library import load_library
from tiercel.system.openmp import adopt_engine_environment

SHAPES = {"qwen05b": (14, 2, 64), "llama1b": (32, 8, 64), "head128": (32, 8, 128)}
"""Query heads, key heads and head_dim."""

CONTEXTS = (512, 4096)  # tokens
SEQUENCES, BLOCK = 16, 16
WIDE, INT8, FP8 = torch.bfloat16, torch.int8, torch.float8_e4m3fn
MOST_BYTES = 0.53  # of a block, over one in bfloat16
MOST_TIME = 1.0  # of int8 over bfloat16, at the longest context

_COLD_BYTES = 128 << 20  # of KV that is used in turns: more than the last cache holds
_TURNS = 9


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """The times of one layer's decode attention in one shape and context."""

    shape: str
    context: int
    block_bytes: dict[str, int]  # of one layer, by type
    ms: dict[str, float]  # median
    ratios: dict[str, float]  # to bfloat16: medians over the turns


class DecodeTrial:
    """One layer's decode attention over caches of one type, which are read in turns."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        context: int,
        cache: torch.dtype,
        activations: torch.dtype,
        reader: PagedReader,
    ) -> None:
        heads, kv_heads, head_dim = shape
        draw = torch.Generator().manual_seed(1)
        blocks = SEQUENCES * context // BLOCK
        block = (BLOCK, kv_heads, width_of(head_dim, cache))
        one = torch.zeros(1, *block, dtype=cache)
        key, value = torch.randn(2, BLOCK, kv_heads, head_dim, generator=draw).to(activations)
        write_rows(key, value, one, ForwardState.of_slices(torch.tensor([[0]]), [0], [BLOCK], BLOCK))
        self.block_bytes = one.nbytes
        self._layers = max(1, _COLD_BYTES // (blocks * one.nbytes))
        arena = one.view(torch.uint8).expand(blocks + 1, self._layers, *one.view(torch.uint8).shape[1:])
        self._arena = arena.contiguous().view(cache)
        tables = (torch.randperm(blocks, generator=draw) + 1).view(SEQUENCES, -1)
        self._state = ForwardState.of_slices(tables, [context - 1] * SEQUENCES, [context] * SEQUENCES, BLOCK)
        self._query = torch.randn(SEQUENCES, heads, head_dim, generator=draw).to(activations)
        self._params = AttentionParams(scale=head_dim**-0.5)
        self._reader = reader

    @torch.inference_mode()
    def seconds(self) -> float:
        """Return the time of one layer, the mean over all of them."""
        start_s = time.perf_counter()
        for layer in range(self._layers):
            self._reader.read(self._query, self._arena[:, layer], self._state, self._params)
        return (time.perf_counter() - start_s) / self._layers


def measure(shape: str, context: int, activations: torch.dtype, narrow: PagedReader, wide: PagedReader) -> DecodeTimes:
    """Time all types in turns; the first turn, which opens buffers, does not count."""
    trials = {
        cache: DecodeTrial(SHAPES[shape], context, cache, activations, wide if cache is WIDE else narrow)
        for cache in (WIDE, INT8, FP8)
    }
    turns = [{cache: trial.seconds() for cache, trial in trials.items()} for _ in range(_TURNS + 1)][1:]
    return DecodeTimes(
        shape=shape,
        context=context,
        block_bytes={dtype_name(cache): trial.block_bytes for cache, trial in trials.items()},
        ms={dtype_name(cache): 1e3 * statistics.median(turn[cache] for turn in turns) for cache in trials},
        ratios={
            dtype_name(cache): statistics.median(turn[cache] / turn[WIDE] for turn in turns) for cache in (INT8, FP8)
        },
    )


def broken_promises(found: list[DecodeTimes]) -> list[str]:
    """Return a line for each promise that does not hold."""
    lines: list[str] = []
    for one in found:
        size = one.block_bytes["int8"] / one.block_bytes["bfloat16"]
        if size > MOST_BYTES:
            lines.append(f"{one.shape}: a block in int8 has {size:.3f} times the bytes, at most {MOST_BYTES} promised")
        if one.context == max(CONTEXTS) and one.ratios["int8"] > MOST_TIME:
            took = one.ratios["int8"]
            lines.append(
                f"{one.shape} {one.context}: int8 takes {took:.2f} times as long, at most {MOST_TIME} promised"
            )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help="default: every core")
    parser.add_argument("--only", default=",".join(SHAPES), help="shapes, with commas")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--control", action="store_true", help="read the 8 bits by torch")
    arguments = parser.parse_args()
    adopt_engine_environment()
    library, processor = load_library(), read_processor(None)
    if library is None:
        parser.error("the native library does not load")
    torch.set_num_threads(arguments.threads or processor.threads)
    activations = torch.bfloat16 if CpuProducts.of(library).has_bf16 else torch.float32
    native = NativeAttention(library)
    narrow = GroupedAttention() if arguments.control else native
    found = [
        measure(shape, context, activations, narrow, native)
        for shape in arguments.only.split(",")
        for context in CONTEXTS
    ]
    if arguments.json:
        print(json.dumps({"processor": asdict(processor), "times": [asdict(one) for one in found]}, indent=2))
    else:
        for one in found:
            times = ", ".join(f"{name} {ms:.3f} ms" for name, ms in one.ms.items())
            ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in one.ratios.items())
            print(f"{one.shape} {one.context} tokens: {times}; to bfloat16: {ratios}; block bytes {one.block_bytes}")
    lines = broken_promises(found)
    for line in lines:
        print(line, file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
