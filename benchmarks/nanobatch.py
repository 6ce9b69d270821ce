"""Splits of steps on this machine: the offline search, and whether what it chose pays.

    python benchmarks/nanobatch.py [MODEL] [--random] --search TABLE.json [--seconds 90] [--threads 1]
    python benchmarks/nanobatch.py [MODEL] [--random] --check TABLE.json [--shapes 20] [--yield-ms 0]

The search runs whole steps of a grid of shapes, and every enumerated cut of them, through the real runner (inputs,
forward, sampler), interleaved, and writes the median ratios. The check runs the shapes of the table again, and as many
random ones that are not in it, and prints what the gate chose against the whole step and against the best enumerated
cut; with `--check none` the gate has predictions alone. `--random` is a Llama of 6 layers and 512 wide with random
weights. With one thread the processor's time counts, which other work on the machine disturbs less than the clock's.
The load average is printed, and by how much the whole step differs from itself.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import count, product
from pathlib import Path

import torch

from device.registry import open_device
from embedded import MODEL_DIR
from engine.assembly import kv_spec
from engine.attention.registry import open_attention
from engine.models.base import Model
from engine.models.registry import load_model
from engine.rows import RowBook
from engine.runner import Runner
from engine.sampling import Sampler
from engine.step_grid import GridLimits
from engine.step_times import measure_step_times
from engine.times_file import TimesFile
from scheduler.cost import StepCosts
from scheduler.nanobatch import (
    Shape,
    Split,
    SplitRow,
    SplitTable,
    Splitter,
    Timed,
    cut,
    read_table,
    shape_of,
    splits_of,
    write_table,
)
from scheduler.sequence import Sequence
from tiercel.clock import MonotonicClock
from tiercel.ids import SeqId, SlotId
from tiercel.plan import NanoBatch, Slice, StepPlan, TableUpdate
from tiercel.request import Request, SamplingParams, pack_tokens
from tiercel.settings import EngineSettings

BLOCK_SIZE = 16
LONGEST = 4000  # tokens of one sequence
_ROWS = 160
_ARENA_BYTES = 128 << 20
_LEAST_TURNS = 4
_LOOKS_FREE = 1.03
PREFILLS = (0, 64, 128, 256, 512, 1024)
DECODES = (0, 8, 32)
CONTEXTS = (0, 2048, 8192)
RANDOM_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}


class Lab:
    """Steps that nobody asked for, through the real runner."""

    def __init__(self, model: Model, threads: int) -> None:
        spec = kv_spec(model, BLOCK_SIZE)
        self._slots = max(64, min(4096, _ARENA_BYTES // spec.block_bytes))
        self.kv = torch.zeros(self._slots, spec.layers, BLOCK_SIZE, spec.kv_heads, 2 * spec.head_dim, dtype=model.dtype)
        self.lane = open_device("cpu", threads).open_lane()
        self._rows = RowBook(_ROWS, -(-LONGEST // BLOCK_SIZE))
        self._sequences: dict[SeqId, Sequence] = {}
        sampler = Sampler(_ROWS, model.vocab_size, self.kv.device)
        self._runner = Runner(model, self.kv, sampler, self.lane, self._rows, self._sequences, ())
        self._ids = count(1)
        self._updates: tuple[TableUpdate, ...] = ()
        self._now_s = time.process_time if threads == 1 else time.perf_counter

    def open(self, shape: Shape) -> tuple[Slice, ...]:
        """Slices of such a step, decodes first."""
        self._runner.forget(list(self._sequences))
        self._sequences.clear()
        updates: list[TableUpdate] = []
        slices: list[Slice] = []
        params = SamplingParams(temperature=0.0, max_tokens=8)
        for start, length in _lengths(shape):
            seq = SeqId(next(self._ids))
            prompt = pack_tokens([3 + at % 999 for at in range(start + length)])
            request = Request(id=seq, prompt=prompt, params=params, arrival_s=0.0)
            self._sequences[seq] = Sequence(request, (0.0,), start + length + 8)
            blocks = -(-(start + length) // BLOCK_SIZE)
            # A stride that is prime to the arena: neighbours in a table are no neighbours in memory.
            slots = tuple(SlotId(1 + 7919 * (seq * 251 + block) % (self._slots - 1)) for block in range(blocks))
            updates.append(TableUpdate(seq, 0, slots))
            slices.append(Slice(seq, start, length, True))
        self._updates = tuple(updates)
        return tuple(slices)

    def run(self, batches: tuple[NanoBatch, ...]) -> float:
        """Seconds of one step, from launch to result: of the processor with one thread, by the clock with more."""
        start_s = self._now_s()
        self._runner.launch(StepPlan(1, batches, self._updates)).result()
        self._updates = ()
        return self._now_s() - start_s

    def ratios(
        self, slices: tuple[Slice, ...], ways: list[tuple[NanoBatch, ...]], turns: int, most_s: float
    ) -> list[list[float]]:
        """Time of each way over that of the whole step next to it, a row a turn; after every turn the order turns."""
        whole = (NanoBatch(slices),)
        self.run(whole)
        deadline_s = time.perf_counter() + most_s
        order = list(range(len(ways)))
        rows: list[list[float]] = []
        while len(rows) < turns and (len(rows) < _LEAST_TURNS or time.perf_counter() < deadline_s):
            row = [0.0] * len(ways)
            before = self.run(whole)
            for index in order:
                row[index] = self.run(ways[index])
            after = self.run(whole)
            rows.append([2 * taken / (before + after) for taken in row])
            order.reverse()
        return rows


def _lengths(shape: Shape) -> Iterator[tuple[int, int]]:
    """(start, length) of each sequence: one prompt, and decodes uneven in length, as in service."""
    for at in range(shape.decodes):
        mean = shape.decode_context / shape.decodes
        yield min(LONGEST - 1, round(mean * (0.5 + (at + 0.5) / shape.decodes))), 1
    if shape.prefill_tokens:
        yield min(LONGEST - shape.prefill_tokens, shape.prefill_context), shape.prefill_tokens


def place(prefill: int, decodes: int, context: int) -> Shape:
    """A shape of the table's three axes, its context shared out evenly over the sequences."""
    sequences = decodes + (prefill > 0)
    in_prompt = min(LONGEST - prefill, context // sequences) if prefill else 0
    return Shape(prefill, in_prompt, decodes, context - in_prompt if decodes else 0)


def grid(is_large: bool) -> list[tuple[int, int, int]]:
    """Prefill tokens, decodes, context."""
    prefills, decodes, contexts = ((0, 128, 512), (0, 16), (0, 4096)) if is_large else (PREFILLS, DECODES, CONTEXTS)
    return [
        point
        for point in product(prefills, decodes, contexts)
        if point[0] + point[1] and point[2] <= LONGEST * (point[1] + 1) // 2
    ]


def search(lab: Lab, points: list[tuple[int, int, int]], identity: str, seconds: float) -> SplitTable:
    """Every cut of every shape. What looks free or better is run once more, and the worse of both counts."""
    rows: list[SplitRow] = []
    share_s = seconds / len(points)
    for point in points:
        slices = lab.open(place(*point))
        ratio_by_split: dict[Split, float] = {}
        splits = splits_of(shape_of(slices))[1:]
        for turns, part_s in ((7, 0.5 * share_s), (15, 0.5 * share_s)):
            if splits:
                found = lab.ratios(slices, [cut(slices, split, BLOCK_SIZE) for split in splits], turns, part_s)
                for split, ratios in zip(splits, zip(*found, strict=True), strict=True):
                    ratio_by_split[split] = max(statistics.median(ratios), ratio_by_split.get(split, 0.0))
            splits = [split for split in splits if ratio_by_split[split] < _LOOKS_FREE]
        cuts = tuple(Timed(split, round(ratio, 4)) for split, ratio in ratio_by_split.items())
        rows.append(SplitRow(*point, cuts=cuts))
        best = min(cuts, key=lambda timed: timed.ratio)
        print(f"{point!s:>18}: best cut {_name(best.split)} at {best.ratio:.3f}", flush=True)
    return SplitTable(identity=identity, rows=tuple(rows))


def check(lab: Lab, splitter: Splitter, points: list[tuple[int, int, int]], yield_ms: float, seconds: float) -> None:
    """What the gate chooses, against the whole step and the best cut, found and timed in different turns."""
    losses: list[float] = []
    behind: list[float] = []
    noise: list[float] = []
    for point in points:
        slices = lab.open(place(*point))
        chosen = splitter.choose(slices, yield_ms, BLOCK_SIZE)
        splits = splits_of(shape_of(slices))
        ways = [cut(slices, split, BLOCK_SIZE) for split in (*splits, chosen)]
        rows = lab.ratios(slices, ways, 21, seconds / len(points))
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


def _name(split: Split) -> str:
    return f"{split.prompt_parts}+{split.decode_parts}"


def draw(points: list[tuple[int, int, int]], number: int, rng: random.Random) -> list[tuple[int, int, int]]:
    """Random steps that are no points of the grid, sizes drawn evenly over their magnitudes."""
    most = [max(axis) for axis in zip(*points, strict=True)]
    found: list[tuple[int, int, int]] = []
    while len(found) < number:
        prefill = 0 if rng.random() < 0.2 else round(16 * (most[0] / 16) ** rng.random())
        decodes = 0 if rng.random() < 0.2 else round(most[1] ** rng.random())
        context = round(most[2] ** rng.random())
        if prefill + decodes and context <= LONGEST * (decodes + 1) // 2 and (prefill, decodes, context) not in points:
            found.append((prefill, decodes, context))
    return found


def measured_costs(model: Model, lab: Lab, seconds: float) -> StepCosts:
    """The table of step times, as the engine calibrates it at its start."""
    limits = GridLimits(64, max(PREFILLS), LONGEST, 65_536)
    spec = kv_spec(model, BLOCK_SIZE)
    file = TimesFile(None, ())
    return StepCosts(measure_step_times(model, lab.kv, spec, lab.lane, MonotonicClock(), limits, seconds, file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(MODEL_DIR))
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--search", metavar="TABLE")
    parser.add_argument("--check", metavar="TABLE")
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--shapes", type=int, default=20)
    parser.add_argument("--yield-ms", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--calibration-s", type=float, default=4.0)
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
        model = load_model(settings, cpu, open_attention(settings.attention_backend, cpu))
    lab = Lab(model, args.threads)
    identity = f"{'random' if args.random else model.fingerprint.hex()[:16]} threads={args.threads}"
    points = grid(args.random)
    if args.search:
        Path(args.search).write_bytes(write_table(search(lab, points, identity, args.seconds)))
    if args.check:
        table = None if args.check == "none" else read_table(Path(args.check).read_bytes(), identity)
        splitter = Splitter(measured_costs(model, lab, args.calibration_s), table)
        print("shapes of the grid")
        check(lab, splitter, points, args.yield_ms, args.seconds)
        print("random shapes")
        check(lab, splitter, draw(points, args.shapes, random.Random(args.seed)), args.yield_ms, args.seconds)
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, {identity}")
    lab.lane.close()


if __name__ == "__main__":
    main()
