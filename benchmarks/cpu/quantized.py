"""Products with weights of 4 and 8 bits beside those with bfloat16, on the shapes of a model.

    python benchmarks/cpu/quantized.py [--only qwen05b,llama1b] [--rows 1,16,64,512] [--threads N] [--control]

All matrix products of one forward, whose weights come from memory, for several numbers of rows: bfloat16, int8 with one
scale per output, int4 with a scale for 32 and for 128 inputs, and int8 by x rounded to int8. The kinds take turns, and
ratios are medians over the turns, because the bandwidth of a shared machine changes. The first column of a kind is GB/s
of packed weights for one row and G operations/s for more, the second one the speed relative to bfloat16. The limits of
the machine are measured before and after. More than 64 rows are a prompt, whose head is computed for one row.

Exit code 1 if one row by int4 with a scale for 32 inputs is less than 1.8 times as fast as by bfloat16 on a processor
with AVX512-BF16, or less than 1.2 times on one with AVX2. `--control` measures bfloat16 in the place of int4: the exit
code must be 1 then.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.cpu.limits import READ, measure_limits
from benchmarks.cpu.processor import ProcessorClass, read_processor
from benchmarks.cpu.refusal import refuse
from tiercel.system.openmp import adopt_engine_environment

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tiercel.engine.models.quantized_weight import QuantizedWeight
    from tiercel.engine.native.library import NativeLibrary
    from tiercel.engine.native.linear import PackedLinear

SHAPES: dict[str, list[tuple[int, int, int]]] = {
    "qwen05b": [(1152, 896, 24), (896, 896, 24), (9728, 896, 24), (896, 4864, 24), (32_768, 896, 1)],
    "llama1b": [(3072, 2048, 16), (2048, 2048, 16), (16_384, 2048, 16), (2048, 8192, 16), (32_768, 2048, 1)],
}
"""Outputs, inputs and number of the joined layers of the models of make_models.py; the head is the last."""

PROMISES: dict[ProcessorClass, float] = {"avx2": 1.2, "avx512_bf16": 1.8, "amx": 1.8}
"""Speed of one row by int4 with groups of 32, relative to bfloat16."""

_PROMPT_ROWS = 64  # from more rows on, the head has one row
_TURNS, _LEAST_S = 5, 1.0


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of weights. `group`: inputs that share a scale; 0: one scale per output. `bits`: 16 for bfloat16."""

    name: str
    bits: int
    group: int = 0
    rounds_x: bool = False


KINDS = (
    Kind("bf16", 16),
    Kind("int8", 8),
    Kind("int4", 4, 32),
    Kind("int4 groups of 128", 4, 128),
    Kind("int8, x in int8", 8, 0, rounds_x=True),
)


class Products:
    """The packed weights of a model in one kind."""

    def __init__(self, library: "NativeLibrary", kind: Kind, shapes: Sequence[tuple[int, int, int]]) -> None:
        self._library = library
        self._layers: list[list[PackedLinear]] = []
        for outputs, inputs, count in shapes:
            source = _draw_weight(kind, outputs, inputs)
            self._layers.append([_pack(library, source) for _ in range(count)])
        self._kept: list[Tensor] = []
        self.bytes = sum(_packed_bytes(library, layers[0]) * len(layers) for layers in self._layers)

    def prepare(self, rows: int, kind_of_x: "torch.dtype") -> Callable[[], None]:
        """Return a function that computes the products of one forward, without allocations and little in Python."""
        import torch

        from tiercel.engine.native.table import TYPE_BY_DTYPE

        calls: list[tuple[Callable[..., None], tuple[object, ...]]] = []
        code = TYPE_BY_DTYPE[kind_of_x]
        for place, layers in enumerate(self._layers):
            count = 1 if rows > _PROMPT_ROWS and place == len(self._layers) - 1 else rows
            one = layers[0]
            x = torch.randn(count, one.inputs).to(kind_of_x)
            y = torch.empty(count, one.outputs, dtype=kind_of_x)
            room = torch.empty(one.room_bytes(kind_of_x, count), dtype=torch.uint8)
            self._kept += [x, y, room]
            for layer in layers:
                w = layer.weights
                shared = (code, x.data_ptr(), w.packed, None, y.data_ptr(), count)
                if w.quantized:
                    calls.append((self._library.quantized_linear, (w.quantized, *shared, room.data_ptr())))
                else:
                    calls.append((self._library.linear, (w.type, *shared, one.outputs, one.inputs)))

        def run() -> None:
            for function, words in calls:
                function(*words)

        return run


def operations(shapes: Sequence[tuple[int, int, int]], rows: int) -> float:
    """Return the operations of one forward, a product with its addition counting two."""
    *body, head = shapes
    heads = 1 if rows > _PROMPT_ROWS else rows
    return 2.0 * (rows * sum(o * i * n for o, i, n in body) + heads * head[0] * head[1])


def time_turns(runs: Sequence[Callable[[], None]]) -> list[list[float]]:
    """Return the seconds of every run in each turn; in the first turn, which does not count, buffers are opened."""
    found: list[list[float]] = [[] for _ in runs]
    began_s = time.perf_counter()
    for turn in range(-1, 1000):
        for run, seconds in zip(runs, found, strict=True):
            start_s = time.perf_counter()
            run()
            if turn >= 0:
                seconds.append(time.perf_counter() - start_s)
        if turn + 1 >= _TURNS and time.perf_counter() - began_s >= _LEAST_S:
            break
    return found


def _draw_weight(kind: Kind, outputs: int, inputs: int) -> "Tensor | QuantizedWeight":
    import torch

    from tiercel.engine.models.quantized_weight import QuantizedWeight

    if kind.bits == 16:
        return torch.randn(outputs, inputs).bfloat16()
    most, group = 1 << kind.bits - 1, kind.group or inputs
    values = torch.randint(-most, most, (outputs, inputs), dtype=torch.int8)
    scales = torch.rand(outputs, inputs // group).half().float()  # as Q4_0 and Q8_0 have them
    return QuantizedWeight(values, scales, None, None, group, kind.bits, "int8" if kind.rounds_x else None)


def _pack(library: "NativeLibrary", source: "Tensor | QuantizedWeight") -> "PackedLinear":
    from torch import Tensor

    from tiercel.engine.native.linear import PackedLinear

    if isinstance(source, Tensor):
        return PackedLinear(library, source, None)
    packed = PackedLinear.quantized(library, source, None)
    return packed if packed is not None else refuse("the native kernels do not know this kind of weight")


def _packed_bytes(library: "NativeLibrary", one: "PackedLinear") -> int:
    layout = one.weights.quantized
    return library.quantized_bytes(layout) if layout else library.linear_bytes(one.outputs, one.inputs)


def main() -> int:
    arguments = _parse()
    adopt_engine_environment()
    # lazy: torch reads the environment when it is loaded
    import torch

    from tiercel.engine.native.library import load_library
    from tiercel.engine.native.table import CpuClass

    library = load_library()
    if library is None:
        refuse("the native kernels are missing; compile them with `make setup`")
    processor = read_processor(os.environ.get("TIERCEL_CPU_CLASS"))
    threads = arguments.threads or processor.threads
    torch.set_num_threads(threads)
    kind_of_x = torch.bfloat16 if library.cpu_class >= CpuClass.AVX512 else torch.float32
    before = measure_limits(processor.kind, threads)
    lines: list[str] = []
    speeds: list[float] = []
    for model in arguments.only:
        shapes = SHAPES[model]
        kinds = [Kind(one.name, 16) if arguments.control and one is KINDS[2] else one for one in KINDS]
        products = [Products(library, kind, shapes) for kind in kinds]
        for rows in arguments.rows:
            turns = time_turns([one.prepare(rows, kind_of_x) for one in products])
            cells = [f"{model}, {rows} row{'s' * (rows > 1)}"]
            for one, seconds in zip(products, turns, strict=True):
                speed = statistics.median(a / b for a, b in zip(turns[0], seconds, strict=True))
                work = one.bytes if rows == 1 else operations(shapes, rows)
                cells.append(f"{work / min(seconds) / 1e9:.0f} | {speed:.2f}")
                if rows == 1 and one is products[2]:
                    speeds.append(speed)
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], file=sys.stderr, flush=True)
        del products
    after = measure_limits(processor.kind, threads)
    limits = {name: max(value, after[name]) for name, value in before.items()}
    print(f"{processor.name}, {library.class_name}, {threads} threads, x {str(kind_of_x).removeprefix('torch.')}")
    print(", ".join(f"{name} {value:.0f}" for name, value in limits.items()) + f"; one row is bound by {READ}\n")
    print(f"| | {' | '.join(f'{kind.name} | x bf16' for kind in KINDS)} |")
    print(f"|{'---|' * (1 + 2 * len(KINDS))}")
    print("\n".join(lines))
    limit = PROMISES.get(processor.kind)
    if limit is None or not speeds:
        return 0
    is_kept = min(speeds) >= limit
    print(f"\none row by int4: {min(speeds):.2f} times bfloat16, promised {limit}: {'kept' if is_kept else 'BROKEN'}")
    return int(not is_kept)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SHAPES), help="models, with commas")
    parser.add_argument(
        "--rows", type=lambda text: [int(one) for one in text.split(",")], default=[1, 16, 64, 512], help="with commas"
    )
    parser.add_argument("--threads", type=int, help="default: every core")
    parser.add_argument("--control", action="store_true", help="measure bfloat16 in the place of int4")
    arguments = parser.parse_args()
    if unknown := set(arguments.only) - set(SHAPES):
        parser.error(f"--only: {', '.join(sorted(unknown))} unknown; known are {', '.join(SHAPES)}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
