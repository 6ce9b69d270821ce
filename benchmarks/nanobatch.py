"""Nano-batches on this machine: the automatic search, and its choices compared with the best split.

python benchmarks/nanobatch.py [MODEL] [--random] [--table FILE] [--tokens 1024] [--seconds 300] [--check-seconds 300]
                               [--shapes 20] [--threads 1] [--seed 0]

Searches as `tiercel calibrate` does, or reads the FILE of an earlier run. Then times the choices of the gate against
the whole step and against the best of all splits, on the shapes of the grid and on random ones. --random uses a random
model of 6 layers, 512 wide, instead of the embedded one. With one thread processor time counts, which other programs on
the machine disturb least."""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

import msgspec
import torch

from benchmarks.random_llama import random_llama
from tiercel.device.registry import open_device
from tiercel.embedded import MODEL_DIR
from tiercel.engine.attention.registry import open_attention
from tiercel.engine.measure.split_search import Point, SplitBench, search
from tiercel.engine.models.base import kv_spec
from tiercel.engine.models.registry import load_model
from tiercel.engine.native.library import load_library
from tiercel.scheduler.nanobatch import (
    Split,
    SplitRow,
    SplitTable,
    Splitter,
    candidate_splits,
    cut,
    shape_of,
)
from tiercel.settings.settings import EngineSettings

BLOCK_SIZE = 16
MAX_ROWS = 64
RANDOM_MODEL = random_llama(
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
)


def check(bench: SplitBench, splitter: Splitter, points: list[Point], seconds: float) -> None:
    """Compare the choices of the gate with the whole step and the best split, found and timed in different turns."""
    losses: list[float] = []
    behind: list[float] = []
    noise: list[float] = []
    for point in points:
        slices = bench.open(*point)
        chosen = splitter.choose(slices)
        splits = candidate_splits(shape_of(slices))
        rows = bench.ratios(slices, [*splits, chosen], 21, seconds / len(points))
        finding, timing = rows[::2], rows[1::2]
        medians = [statistics.median(column) for column in zip(*finding, strict=True)][:-1]
        best = medians.index(min(medians))
        timed = [statistics.median(column) for column in zip(*timing, strict=True)]
        own = 1.0 if chosen == splits[0] else timed[-1]
        best_ratio = min(1.0, timed[best]) if best else 1.0
        losses.append(own - 1)
        behind.append(own / best_ratio - 1)
        noise.append(abs(timed[0] - 1))
        print(
            f"{point!s:>18}: chose {_name(chosen)} {own:.3f}, best {_name(splits[best])} {best_ratio:.3f}, "
            f"{len(cut(slices, chosen, BLOCK_SIZE))} nano-batches, whole again {timed[0]:.3f}",
            flush=True,
        )
    print(
        f"against the whole step: at most {max(losses):+.1%}; against the best cut: at most {max(behind):+.1%}, "
        f"over 5 % on {sum(one > 0.05 for one in behind)} of {len(points)}; "
        f"the whole step against itself: median {statistics.median(noise):.1%}, at most {max(noise):.1%}"
    )


def tell(row: SplitRow) -> None:
    """Print one searched shape."""
    best = min(row.cuts, key=lambda timed: timed.ratio)
    point = (row.prefill_tokens, row.decodes, row.context_tokens)
    print(f"{point!s:>18}: best cut {_name(best.split)} at {best.ratio:.3f}", flush=True)


def _name(split: Split) -> str:
    return f"{split.prompt_parts}+{split.decode_parts}"


def draw(bench: SplitBench, points: list[Point], number: int, rng: random.Random) -> list[Point]:
    """Draw random steps off the grid, with log-uniform sizes."""
    most = [max(axis) for axis in zip(*points, strict=True)]
    found: list[Point] = []
    while len(found) < number:
        prefill = 0 if rng.random() < 0.2 else round(16 * (most[0] / 16) ** rng.random())
        decodes = 0 if rng.random() < 0.2 else round(most[1] ** rng.random())
        context = round(most[2] ** rng.random())
        if prefill + decodes and bench.has(prefill, decodes, context) and (prefill, decodes, context) not in points:
            found.append((prefill, decodes, context))
    return found


def main() -> None:
    """Search, then check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(MODEL_DIR))
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--tokens", type=int, default=1024, help="most of a step")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--check-seconds", type=float, default=300.0)
    parser.add_argument("--shapes", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.random:
            Path(folder, "config.json").write_text(json.dumps(RANDOM_MODEL))
        settings = EngineSettings(
            model=folder if args.random else args.model,
            threads=args.threads,
            load_format="dummy" if args.random else "auto",
        )
        cpu = torch.device("cpu")
        model = load_model(settings, cpu, open_attention(settings.attention_backend, cpu), library=load_library())
    lane = open_device("cpu", args.threads).open_lane()
    now_s = time.process_time if args.threads == 1 else time.perf_counter
    bench = SplitBench(model, kv_spec(model, BLOCK_SIZE), lane, now_s)
    identity = f"{'random' if args.random else model.fingerprint.hex()[:16]} threads={args.threads}"
    points = bench.points(args.tokens, MAX_ROWS)
    if args.table and args.table.exists():
        table = msgspec.json.decode(args.table.read_bytes(), type=SplitTable)
        if table.identity != identity:
            parser.error(f"--table {args.table}: measured for {table.identity}, not for {identity}")
    else:
        table = SplitTable(identity=identity, rows=search(bench, points, args.seconds, tell))
        if args.table:
            args.table.write_bytes(msgspec.json.encode(table))
    splitter = Splitter(table)
    print("shapes of the grid")
    check(bench, splitter, points, args.check_seconds)
    print("random shapes")
    check(bench, splitter, draw(bench, points, args.shapes, random.Random(args.seed)), args.check_seconds)
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, {identity}")
    lane.close()


if __name__ == "__main__":
    main()
