"""What steps of this model take on this machine: measured by forwards, kept on disk, made finer by every restart."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tiercel.clock import Clock
from tiercel.device.base import Device, Lane
from tiercel.engine.forward.state import ForwardState
from tiercel.engine.measure.cache_file import CacheFile
from tiercel.engine.measure.machine_facts import machine_facts
from tiercel.engine.measure.step_grid import FAR_CONTEXT, GridLimits, Slices, StepGrid, StepShape
from tiercel.engine.measure.stored_times import StoredTimes, open_times_file, read_times, write_times
from tiercel.engine.memory.capacity import step_tokens
from tiercel.engine.models.base import Model
from tiercel.engine.step.graphs import DecodeGraphs
from tiercel.engine.step.inputs import BatchInputs
from tiercel.engine.step.staging import open_staging
from tiercel.errors import DeviceError
from tiercel.scheduler.cost import StepTimes, linear_times
from tiercel.settings import EngineSettings
from tiercel.tier import Capacity, KVSpec

log = logging.getLogger(__name__)

_RUNS = 3  # of one shape, the fastest counts
_SHARE = 1 / 25  # of the budget: a shape that has taken so much is not run again
_KEPT = 0.95  # of the budget for forwards, the rest for the table and its file
_SURPRISE = 2.0  # times the guess: more than steps can grow by
_ARENA_BYTES = 64 << 20  # blocks to read: more than a core's own caches hold


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
) -> StepTimes:
    """The table for the limits of this engine: from the cache folder, and what the budget adds to it.

    `graphs`: what decodes run in, recorded on `kv`.
    """
    limits = limits_of(settings, model, device, capacity)
    recorded = () if graphs is None else graphs.sizes
    facts = (*machine_facts(settings, model, spec, device), repr(limits), repr(recorded))
    file = open_times_file(settings.cache_folder, facts)
    trial = Trial(model, kv, spec, lane, clock, graphs)
    return measure_step_times(trial, clock, limits, settings.calibration_s, file)


def limits_of(settings: EngineSettings, model: Model, device: Device, capacity: Capacity) -> GridLimits:
    """How far the table reaches. What free memory decided is rounded down: else every start had a table of its own."""
    longest = capacity.max_model_len
    if longest < (settings.max_model_len or model.max_model_len):
        longest = _rounded(longest)
    return GridLimits(
        max_num_seqs=settings.max_num_seqs,
        step_tokens=step_tokens(settings, device),
        max_model_len=longest,
        kv_tokens=_rounded(min(capacity.blocks * capacity.block_size, max(FAR_CONTEXT, longest))),
    )


def _rounded(count: int) -> int:
    """Down to a power of two."""
    return 1 << (count.bit_length() - 1)


def measure_step_times(
    trial: "Trial", clock: Clock, limits: GridLimits, budget_s: float, file: CacheFile[StoredTimes]
) -> StepTimes:
    """Milliseconds of whole steps, without sampling, on a grid that the limits give.

    Cost:    `budget_s` at most, but for a last forward that turns out slower than the smaller ones promised. With a
             budget of 0 nothing is measured nor read, and the table is the linear default.
    Effects: those of the trial's forwards. `file` is written.
    Errors:  DeviceError when the device fails.
    On CUDA the same code waits for the lane's event; not measured yet.
    """
    if budget_s <= 0:
        log.info("step times source=default")
        return linear_times()
    start_s = clock.now_s()
    grid = StepGrid(limits)
    known = read_times(file, grid)
    measured = _measure_missing(grid, known, trial, start_s + _KEPT * budget_s, _SHARE * budget_s, clock)
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


class Trial:
    """Forwards of steps that nobody asked for.

    Of the arena only the layout counts, blocks are read from one made for the purpose: one block read again and again
    would come from the processor's cache. A graph reads all over the arena itself and writes to its null block.
    """

    def __init__(
        self, model: Model, kv: Tensor, spec: KVSpec, lane: Lane, clock: Clock, graphs: DecodeGraphs | None = None
    ) -> None:
        self._model = model
        self._like = kv
        self._graphs = graphs
        self._staging = open_staging(kv.device, lane)
        self._block_size = spec.block_size
        self._slots = max(1, min(_ARENA_BYTES // spec.block_bytes, kv.shape[0]))
        self._arena: Tensor | None = None
        self._lane = lane
        self._clock = clock

    def fastest_ms(self, slices: Slices, share_s: float, deadline_s: float = math.inf) -> float:
        """The fastest of a few: what else the machine does only ever adds.

        Cost:   one forward, and more until they have taken `share_s` or the deadline is past.
        Errors: DeviceError.
        """
        is_first = self._arena is None
        if is_first:
            self._arena = _open_arena(self._like, self._slots)
        spent_s = fastest_s = self._run(slices)
        if is_first and spent_s <= share_s:
            fastest_s = self._run(slices)  # the very first one opened libraries and buffers
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
        """A job that runs such a step in its graph; None where it has none."""
        graphs, block_size = self._graphs, self._block_size
        if graphs is None or any(length > 1 for length in slices.lengths):
            return None
        starts = np.array(slices.starts, np.int64)
        tables = _scattered(len(starts), -(-int(starts.max() + 1) // block_size), self._like.shape[0])
        batch = BatchInputs.of_decodes(starts, tables.numpy())
        size = graphs.size_of(batch)
        if size is None:
            return None

        @torch.inference_mode()
        def replay() -> Tensor:
            logits, _ = graphs.run_no_sync(batch, size, self._staging)
            return logits.max(dim=-1).values

        return replay

    def _forward_of(self, slices: Slices) -> Callable[[], Tensor]:
        """A job that runs such a step, its inputs on the host until then. Writes slot 0, reads all over the arena."""
        model, kv, block_size = self._model, self._arena, self._block_size
        assert kv is not None
        ends = [start + length for start, length in zip(slices.starts, slices.lengths, strict=True)]
        tables = _scattered(len(ends), -(-max(ends) // block_size), kv.shape[0])
        first = ForwardState.of_slices(tables.to(kv.device), slices.starts, ends, block_size, writes_null_block=True)

        @torch.inference_mode()
        def forward() -> Tensor:
            state = replace(first)  # a step like the first, yet another one: backends keep what they know of a step
            hidden = model.forward(state.positions % model.vocab_size, kv, state)
            return model.logits(hidden[state.device_query_starts[1:].long() - 1]).max(dim=-1).values

        return forward


def _measure_missing(
    grid: StepGrid,
    known: dict[StepShape, float],
    trial: Trial,
    deadline_s: float,
    share_s: float,
    clock: Clock,
) -> dict[StepShape, float]:
    """What is not known yet, in order of usefulness, as far as it is likely to end in time; one in any case."""
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
            ms = min(ms, trial.fastest_ms(slices, share_s, deadline_s))  # something else had the machine
        measured[shape] = ms
    return measured


def _open_arena(like: Tensor, slots: int) -> Tensor:
    """Blocks of the same layout; the null block alone where there is no memory for more."""
    try:
        return torch.zeros((slots, *like.shape[1:]), dtype=like.dtype, device=like.device)
    except RuntimeError:  # torch's way to say that memory is short
        return like[:1]


def _scattered(rows: int, blocks: int, slots: int) -> Tensor:
    """Block tables in which neighbours are no neighbours in memory. Shapes: [rows, blocks] int64."""
    # A stride that is prime to almost every number of slots.
    return (torch.arange(rows * blocks) * 7919 % slots).view(rows, blocks)
