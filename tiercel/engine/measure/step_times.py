"""Measure the times of steps. They are kept on disk, and every start measures some more shapes."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tiercel.device.base import Device, Lane
from tiercel.engine.forward.state import ForwardState
from tiercel.engine.measure.cache_file import CacheFile
from tiercel.engine.measure.machine_facts import machine_facts
from tiercel.engine.measure.step_grid import FAR_CONTEXT, GridLimits, Slices, StepGrid, StepShape
from tiercel.engine.measure.stored_times import StoredTimes, open_times_file, read_times, write_times
from tiercel.engine.memory.capacity import step_tokens
from tiercel.engine.models.base import Model
from tiercel.engine.step.graphs import DecodeGraphs
from tiercel.engine.step.mixed_graphs import MixedGraphs, trial_batch
from tiercel.engine.step.staging import Staging, open_staging
from tiercel.engine.step.tables import DeviceTables
from tiercel.scheduler.cost import StepTimes, linear_times
from tiercel.settings.settings import EngineSettings
from tiercel.values.clock import Clock
from tiercel.values.errors import DeviceError
from tiercel.values.facts import Facts
from tiercel.values.tier import Capacity, KVSpec

log = logging.getLogger(__name__)

_RUNS = 3  # of one shape; the fastest counts
_SHARE = 1 / 25  # of the budget; a shape that has used it is not run again
_FORWARD_SHARE = 0.95  # of the budget; the rest is for the table and its file
_SURPRISE = 2.0  # times the guess: more than the difference between shapes can explain
_ARENA_BYTES = 64 << 20  # of blocks to read: more than the caches of a core hold


def open_step_times(
    settings: EngineSettings,
    model: Model,
    kv: Tensor,
    spec: KVSpec,
    device: Device,
    lane: Lane,
    clock: Clock,
    capacity: Capacity,
    graphs: DecodeGraphs | None = None,
    staging: Staging | None = None,
    mixed: MixedGraphs | None = None,
) -> StepTimes:
    """Return the table for the limits of this engine, from the cache folder and from measurements within the budget.

    `graphs` and `mixed`: the graphs that decodes and small mixed steps run in, recorded on `kv`. `staging`: see
    `TrialForward`.
    """
    limits = limits_of(settings, model, device, capacity)
    recorded: Facts = {
        "decodes": None if graphs is None else graphs.sizes,
        "halved_decodes": None if graphs is None else graphs.halved,
        "mixed_steps": None if mixed is None else mixed.sizes,
    }
    machine = machine_facts(settings, model, spec, device)
    file = open_times_file(settings.cache_folder, {**machine, "limits": limits.facts, "graphs": recorded})
    trial = TrialForward(model, kv, spec, lane, clock, graphs, staging, mixed)
    return measure_step_times(trial, clock, limits, settings.calibration_s, file)


def limits_of(settings: EngineSettings, model: Model, device: Device, capacity: Capacity) -> GridLimits:
    """Return the limits of the table.

    Limits that follow from free memory are rounded down to powers of two, otherwise every start would have a file of
    its own.
    """
    longest = capacity.max_model_len
    if longest < (settings.max_model_len or model.max_model_len):
        longest = _rounded(longest)
    return GridLimits(
        max_num_seqs=settings.sequences,
        step_tokens=step_tokens(settings, device),
        max_model_len=longest,
        kv_tokens=_rounded(min(capacity.blocks * capacity.block_size, max(FAR_CONTEXT, longest))),
    )


def _rounded(count: int) -> int:
    """Round down to a power of two."""
    return 1 << (count.bit_length() - 1)


def measure_step_times(
    trial: "TrialForward", clock: Clock, limits: GridLimits, budget_s: float, file: CacheFile[StoredTimes]
) -> StepTimes:
    """Return the milliseconds of whole steps, without sampling, on the grid of these limits.

    Cost:    at most `budget_s`, unless the last forward is slower than the smaller ones suggested. With a budget of 0
             nothing is measured or read, and the table is the linear default.
    Effects: those of the trial's forwards. `file` is written.
    Errors:  DeviceError if the device fails.
    """
    if budget_s <= 0:
        log.info("step times source=default")
        return linear_times()
    start_s = clock.now_s()
    grid = StepGrid(limits)
    known = read_times(file, grid)
    measured = _measure_missing(grid, known, trial, start_s + _FORWARD_SHARE * budget_s, _SHARE * budget_s, clock)
    times = grid.table(known | measured)
    if measured:
        write_times(file, known | measured)
    log.info(
        "step times source=%s points=%d of %d measured=%d s=%.2f decode_ms=%.2f prefill_%d_ms=%.2f path=%s",
        ("both" if known else "measured") if measured else "file",
        len(known | measured),
        len(grid.shapes()),
        len(measured),
        clock.now_s() - start_s,
        times.ms[len(times.context_tokens)],
        times.prefill_tokens[-1],
        times.ms[-len(times.decodes) * len(times.context_tokens)],
        file.path,
    )
    return times


class TrialForward:
    """Runs and times forwards without requests.

    A single block that is read again and again would come from the processor's cache. On a CPU, blocks are read from
    an arena made for this purpose with the layout of the engine's arena, whose pages are not real yet. On a GPU, blocks
    all over the engine's own arena are read and its null block is written: the second-level cache of a GPU would hold a
    layer of a smaller arena, and steps would seem faster than they are. Between two reads of a layer's keys all weights
    are read, so that repeating a step leaves nothing in the cache that serving would not find there.
    """

    def __init__(
        self,
        model: Model,
        kv: Tensor,
        spec: KVSpec,
        lane: Lane,
        clock: Clock,
        graphs: DecodeGraphs | None = None,
        staging: Staging | None = None,
        mixed: MixedGraphs | None = None,
    ) -> None:
        """`staging`: of the lane; by default one without kernels."""
        self._model = model
        self._like = kv
        self._graphs = graphs
        self._mixed = mixed
        self._staging = staging or open_staging(kv.device, lane)
        self._block_size = spec.block_size
        self._slots = max(1, min(_ARENA_BYTES // spec.block_bytes, kv.shape[0]))
        self._arena: Tensor | None = None
        self._lane = lane
        self._clock = clock

    def fastest_ms(self, slices: Slices, share_s: float, deadline_s: float = math.inf) -> float:
        """Return the time of the fastest of up to three runs, because other work on the machine only adds time.

        Cost:   one forward, and further ones until they have taken `share_s` or the deadline is past.
        Errors: DeviceError.
        """
        is_first = self._arena is None
        if is_first:
            self._arena = open_trial_arena(self._like, self._slots)
        spent_s = fastest_s = self._run(slices)
        if is_first and spent_s <= share_s:
            fastest_s = self._run(slices)  # the first forward of a process also opened libraries and buffers
        for _ in range(_RUNS - 1):
            if spent_s > share_s or self._clock.now_s() >= deadline_s:
                break
            last_s = self._run(slices)
            spent_s += last_s
            fastest_s = min(fastest_s, last_s)
        return 1e3 * fastest_s

    def _run(self, slices: Slices) -> float:
        forward = self._replay_of(slices) or self._forward_of(slices)
        start_s = self._clock.now_s()
        try:
            self._lane.run(forward).result()
        except RuntimeError as exc:
            raise DeviceError("device.measure_failed", f"{type(exc).__name__}: {exc}") from exc
        return self._clock.now_s() - start_s

    def _replay_of(self, slices: Slices) -> Callable[[], Tensor] | None:
        """Return a job that runs the step in its graph; None if it has none."""
        graphs, mixed, model = self._graphs, self._mixed, self._model
        if graphs is None and mixed is None:
            return None
        starts, lengths = np.array(slices.starts, np.int64), np.array(slices.lengths, np.int64)
        tables = _scattered(len(starts), -(-int((starts + lengths).max()) // self._block_size), self._like.shape[0])
        tokens = spread_tokens(int(lengths.sum()), model.vocab_size)
        batch = trial_batch(starts, lengths, tables.shape[1], tokens.numpy())
        rows = None if graphs is None else graphs.size_of(batch)
        size = None if mixed is None else mixed.size_of(batch)
        on_device = DeviceTables(tables.to(self._like.device))

        @torch.inference_mode()
        def replay_decode() -> Tensor:
            assert graphs is not None and rows is not None
            return graphs.run_no_sync(batch, rows, self._staging, on_device)[0].max(dim=-1).values

        @torch.inference_mode()
        def replay_mixed() -> Tensor:
            assert mixed is not None and size is not None
            hidden, sample_at, *_ = mixed.run_no_sync(batch, size, self._staging, on_device)
            return model.logits(hidden.index_select(0, sample_at)).max(dim=-1).values

        if rows is not None:
            return replay_decode
        return None if size is None else replay_mixed

    def _forward_of(self, slices: Slices) -> Callable[[], Tensor]:
        """Return a job that runs the step. It writes slot 0 and reads blocks all over the arena."""
        model, kv, block_size = self._model, self._arena, self._block_size
        assert kv is not None
        ends = [start + length for start, length in zip(slices.starts, slices.lengths, strict=True)]
        tables = _scattered(len(ends), -(-max(ends) // block_size), kv.shape[0])
        first = ForwardState.of_slices(tables.to(kv.device), slices.starts, ends, block_size, writes_null_block=True)

        tokens = spread_tokens(sum(slices.lengths), model.vocab_size).to(kv.device)

        @torch.inference_mode()
        def forward() -> Tensor:
            state = replace(first)  # a new object, because backends cache the facts of a step by its state
            hidden = model.forward(tokens, kv, state)
            return model.logits(hidden[state.device_query_starts[1:].long() - 1]).max(dim=-1).values

        return forward


def _measure_missing(
    grid: StepGrid,
    known: dict[StepShape, float],
    trial: TrialForward,
    deadline_s: float,
    share_s: float,
    clock: Clock,
) -> dict[StepShape, float]:
    """Measure unknown shapes in order of usefulness, as far as they are likely to end in time, but at least one."""
    measured: dict[StepShape, float] = {}
    for shape in grid.shapes():
        left_s = max(0.0, deadline_s - clock.now_s())
        if not left_s and (known or measured):
            break
        slices = grid.slices(shape)
        if shape in known or slices is None:
            continue
        guess_ms = grid.guess_ms(shape, known | measured)
        if guess_ms > 1e3 * left_s:
            continue
        ms = trial.fastest_ms(slices, share_s, deadline_s)
        if ms > _SURPRISE * guess_ms > 0 and clock.now_s() < deadline_s:
            ms = min(ms, trial.fastest_ms(slices, share_s, deadline_s))  # other work may have disturbed the first run
        measured[shape] = ms
    return measured


def open_trial_arena(like: Tensor, slots: int) -> Tensor:
    """Return the blocks that trial steps read: on a GPU those of the engine's arena `like`; on a CPU a new arena of the
    same layout, or the null block of `like` if there is no memory for more.
    """
    if like.device.type != "cpu":
        return like
    try:
        return torch.zeros((slots, *like.shape[1:]), dtype=like.dtype, device=like.device)
    except RuntimeError:  # raised by torch if memory is short
        return like[:1]


def spread_tokens(count: int, vocab_size: int) -> Tensor:
    """Return tokens that differ as far as there are so many: equal ones would all choose the same experts.

    A step of a mixture takes as long as it takes to read the distinct experts that its tokens choose.
    Shapes: [count] int64.
    """
    return torch.arange(count) * 7919 % vocab_size  # prime to almost every size of a vocabulary


def _scattered(rows: int, blocks: int, slots: int) -> Tensor:
    """Return block tables in which neighbours are not adjacent in memory. Shapes: [rows, blocks] int64."""
    # The stride is prime to almost every number of slots.
    return (torch.arange(rows * blocks) * 7919 % slots).view(rows, blocks)
