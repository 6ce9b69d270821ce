"""The search of `tiercel calibrate`: run every cut of many step shapes, each next to the whole step.

This is the offline half of NanoFlow's automatic search (arXiv:2408.12757, section 4). The lookup at run time is
`scheduler.nanobatch.Splitter`.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from itertools import count, product
from pathlib import Path

import torch

from tiercel.device.base import Device, Lane
from tiercel.device.registry import open_device
from tiercel.engine.attention.registry import open_attention
from tiercel.engine.measure.cache_file import CacheFile
from tiercel.engine.measure.machine_facts import machine_facts
from tiercel.engine.memory.capacity import step_tokens
from tiercel.engine.models.base import Model, kv_spec
from tiercel.engine.models.registry import load_model
from tiercel.engine.native.library import load_library
from tiercel.engine.sampling import Sampler
from tiercel.engine.step.rows import RowBook
from tiercel.engine.step.runner import Runner
from tiercel.scheduler.account import Account
from tiercel.scheduler.nanobatch import MeasuredSplit, Split, SplitRow, SplitTable, candidate_splits, cut, shape_of
from tiercel.scheduler.sequence import SequenceProgress
from tiercel.settings.settings import EngineSettings
from tiercel.values.errors import ConfigError
from tiercel.values.facts import Facts
from tiercel.values.ids import SeqId, SlotId
from tiercel.values.plan import NanoBatch, Slice, StepPlan, TableUpdate
from tiercel.values.request import Request, SamplingParams, pack_tokens
from tiercel.values.tier import KVSpec

Point = tuple[int, int, int]  # prefill tokens, decodes, context tokens of all sequences: the axes of the split table

_PREFILLS = (0, 64, 128, 256, 512, 1024, 2048)
_DECODES = (0, 8, 32)
_CONTEXTS = (0, 2048, 8192)
_LONGEST = 4000  # tokens of one sequence
_ROWS = 160
_ARENA_BYTES = 128 << 20
_MIN_TURNS = 4
_TURNS = (7, 15)  # of every cut, then of the cuts that look free
_LOOKS_FREE = 1.03  # time over that of the whole step
_SEARCH_S = 300.0  # for all cuts of all shapes


class SplitBench:
    """Runs trial steps through the real runner. CPU only: on CUDA a step has not ended when its launch returns."""

    def __init__(self, model: Model, spec: KVSpec, lane: Lane, now_s: Callable[[], float] = time.perf_counter) -> None:
        """`now_s`: the clock; `time.process_time` excludes other programs if only one thread computes."""
        slots = max(64, min(4096, _ARENA_BYTES // spec.block_bytes))
        layout = (slots, spec.layers, spec.block_size, spec.kv_heads, spec.width)
        self.kv = torch.zeros(layout, dtype=model.precision.kv)
        self._longest = min(_LONGEST, model.max_model_len)
        self._block_size = spec.block_size
        self._rows = RowBook(_ROWS, -(-self._longest // spec.block_size))
        self._sequences: dict[SeqId, SequenceProgress] = {}
        sampler = Sampler(_ROWS, model.vocab_size, self.kv.device)
        self._runner = Runner(model, self.kv, sampler, lane, self._rows, self._sequences, ())
        self._vocab_size = model.vocab_size
        self._ids = count(1)
        self._updates: tuple[TableUpdate, ...] = ()
        self._now_s = now_s

    def points(self, step_tokens: int, max_num_seqs: int) -> list[Point]:
        """Return the shapes to search, as far as steps of this engine can have them."""
        prefills = [tokens for tokens in _PREFILLS if tokens <= min(step_tokens, self._longest)]
        decodes = [rows for rows in _DECODES if rows <= max_num_seqs]
        return [
            (prefill, rows, context)
            for prefill, rows, context in product(prefills, decodes, _CONTEXTS)
            if prefill + rows and self.has(prefill, rows, context)
        ]

    def has(self, prefill: int, decodes: int, context: int) -> bool:
        """Return whether these sequences can hold the context."""
        return context <= (self._longest - prefill) * (decodes + 1) // 2

    def open(self, prefill: int, decodes: int, context: int) -> tuple[Slice, ...]:
        """Return the slices of a step of this shape, decodes first. Replaces the sequences of the step before."""
        self._runner.forget(list(self._sequences))
        self._sequences.clear()
        updates: list[TableUpdate] = []
        slices: list[Slice] = []
        params = SamplingParams(temperature=0.0, max_tokens=8)
        for start, length in self._lengths(prefill, decodes, context):
            seq = SeqId(next(self._ids))
            prompt = pack_tokens([at % self._vocab_size for at in range(start + length)])
            request = Request(id=seq, prompt=prompt, params=params, arrival_s=0.0)
            self._sequences[seq] = SequenceProgress(request, Account(request.band, request.tenant), start + length + 8)
            updates.append(TableUpdate(seq, 0, self._slots(seq, start + length)))
            slices.append(Slice(seq, start, length, True))
        self._updates = tuple(updates)
        return tuple(slices)

    def run(self, batches: tuple[NanoBatch, ...]) -> float:
        """Return the seconds of one step, from launch to result."""
        start_s = self._now_s()
        self._runner.launch(StepPlan(1, batches, self._updates)).result()
        self._updates = ()
        return self._now_s() - start_s

    def ratios(
        self, slices: tuple[Slice, ...], splits: list[Split], turns: int, most_s: float = float("inf")
    ) -> list[list[float]]:
        """Return the time of each cut over the mean time of the whole steps before and after it, one row per turn.

        The order of the cuts is reversed after every turn. At least four turns are made, then until `most_s` is over.
        """
        whole = (NanoBatch(slices),)
        ways = [cut(slices, split, self._block_size) for split in splits]
        self.run(whole)
        deadline_s = time.perf_counter() + most_s
        order = list(range(len(ways)))
        rows: list[list[float]] = []
        while len(rows) < turns and (len(rows) < _MIN_TURNS or time.perf_counter() < deadline_s):
            row = [0.0] * len(ways)
            before = self.run(whole)
            for index in order:
                row[index] = self.run(ways[index])
            after = self.run(whole)
            rows.append([2 * taken / (before + after) for taken in row])
            order.reverse()
        return rows

    def _lengths(self, prefill: int, decodes: int, context: int) -> Iterator[tuple[int, int]]:
        """Yield (start, length) of each sequence: decodes of uneven length, as in service, and one prompt."""
        in_prompt = min(self._longest - prefill, context // (decodes + 1)) if prefill else 0
        for at in range(decodes):
            mean = (context - in_prompt) / decodes
            yield min(self._longest - 1, round(mean * (0.5 + (at + 0.5) / decodes))), 1
        if prefill:
            yield in_prompt, prefill

    def _slots(self, seq: SeqId, tokens: int) -> tuple[SlotId, ...]:
        """Return slots in a stride that is prime to the arena, so that neighbours are not adjacent in memory."""
        blocks = -(-tokens // self._block_size)
        return tuple(SlotId(1 + 7919 * (seq * 251 + block) % (self.kv.shape[0] - 1)) for block in range(blocks))


def search(
    bench: SplitBench, points: list[Point], seconds: float, on_row: Callable[[SplitRow], None] = lambda row: None
) -> tuple[SplitRow, ...]:
    """Measure every cut of every shape. Cuts that look free are measured again, and the worse median counts.

    Cost: about `seconds`; more if four turns of a shape take longer than its share.
    """
    rows: list[SplitRow] = []
    share_s = seconds / len(points) / len(_TURNS)
    for point in points:
        slices = bench.open(*point)
        ratio_by_split: dict[Split, float] = {}
        splits = candidate_splits(shape_of(slices))[1:]
        for turns in _TURNS:
            if not splits:
                break
            found = bench.ratios(slices, splits, turns, share_s)
            for split, ratios in zip(splits, zip(*found, strict=True), strict=True):
                ratio_by_split[split] = max(statistics.median(ratios), ratio_by_split.get(split, 0.0))
            splits = [split for split in splits if ratio_by_split[split] < _LOOKS_FREE]
        cuts = tuple(MeasuredSplit(split, round(ratio, 4)) for split, ratio in ratio_by_split.items())
        rows.append(SplitRow(*point, cuts=cuts))
        on_row(rows[-1])
    return tuple(rows)


def open_splits_file(folder: str | None, facts: Facts) -> CacheFile[SplitTable]:
    """Return the file of the search for these facts."""
    return CacheFile(folder, "splits", facts, SplitTable)


def calibrate_splits(
    settings: EngineSettings,
    on_row: Callable[[SplitRow], None],
    device: Device | None = None,
    seconds: float = _SEARCH_S,
) -> Path | None:
    """Measure which cuts are faster than whole steps on this machine, and keep the table. Return the path of its file.

    `on_row` is called with every measured shape. Each shape is measured for its share of `seconds`, but at least
    four times.
    Errors: ConfigError; OSError when the file cannot be written.
    """
    device = device or open_device(settings.device, settings.threads)
    if device.name != "cpu":
        raise ConfigError("calibrate.device", f"--device {device.name}: nano-batches are searched on the CPU only")
    cpu = torch.device(device.name)
    model = load_model(settings, cpu, open_attention(settings.attention_backend, cpu), library=load_library())
    spec = kv_spec(model, settings.block_size)
    lane = device.open_lane()
    bench = SplitBench(model, spec, lane)
    points = bench.points(step_tokens(settings, device), settings.sequences)
    rows = search(bench, points, seconds, on_row)
    lane.close()
    file = open_splits_file(settings.cache_folder, machine_facts(settings, model, spec, device))
    file.write(SplitTable(identity=file.identity, rows=rows))
    return file.path
