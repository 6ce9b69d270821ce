"""The gate of overlapping halves: the times of serial and of overlapped steps, and what follows from them.

`tiercel calibrate` measures on a GPU, and keeps the table beside the step times. Each start reads it; without a table
no step overlaps.
"""

import statistics
from collections.abc import Callable, Iterator
from math import log2
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from msgspec import Meta, Struct
from torch import Tensor

from tiercel.device.base import Device, Lane
from tiercel.device.fork import Fork
from tiercel.device.registry import open_device
from tiercel.engine.attention.registry import open_attention
from tiercel.engine.measure.cache_file import CacheFile
from tiercel.engine.measure.decode_choice import measure_decodes
from tiercel.engine.measure.dense_choice import route_products
from tiercel.engine.measure.machine_facts import machine_facts
from tiercel.engine.memory.capacity import for_device, step_tokens
from tiercel.engine.models.base import Model, kv_spec
from tiercel.engine.models.decoder import Decoder
from tiercel.engine.models.phases import PhasedModel
from tiercel.engine.models.registry import load_model
from tiercel.engine.step.graphs import record_graphs, wants_graphs
from tiercel.engine.step.halves import Overlap
from tiercel.engine.step.inputs import BatchInputs
from tiercel.engine.step.last_tokens import LastTokens
from tiercel.engine.step.mixed_graphs import MAX_MIXED_TOKENS, trial_batch
from tiercel.engine.step.staging import open_staging
from tiercel.engine.step.tables import DeviceTables
from tiercel.settings.settings import EngineSettings
from tiercel.values.clock import Clock, MonotonicClock
from tiercel.values.errors import ConfigError, DeviceError
from tiercel.values.facts import Facts
from tiercel.values.tier import KVSpec

LEAST_GAIN = 1.15
"""The least time of a serial step over that of an overlapped one with which steps of its shape overlap."""

_DECODES = (64, 128, 256, 512)
_STEPS = tuple((tokens, decodes) for tokens in (768, 1024, 2048, 4096, 8192) for decodes in (0, 128, 256, 512))
_CONTEXT = 1280  # tokens of a decode: the middle of an answer of 512 tokens after a prompt of 1,024
_TURNS = 9
_ARENA_SHARE = 0.5  # of free memory, at most what the contexts need
_TOKEN_REACH, _DECODE_REACH = 1.5, 2.0  # a measured shape speaks for shapes up to these factors larger or smaller

_Count = Annotated[int, Meta(ge=0, le=1 << 30)]


class OverlapRow(Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """One measured shape. `gain`: the time of the serial step over that of the overlapped one."""

    tokens: _Count
    decodes: _Count
    gain: Annotated[float, Meta(gt=0, le=1e3)]

    @property
    def is_decode(self) -> bool:
        """Whether the step was run in graphs of decodes."""
        return self.tokens == self.decodes


class OverlapTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measured shapes."""

    version: Annotated[int, Meta(ge=1, le=1)] = 1
    identity: Annotated[str, Meta(max_length=200)] = ""  # of the model and the machine
    rows: Annotated[tuple[OverlapRow, ...], Meta(max_length=4096)]


class OverlapGate:
    """Decides which steps are computed in two overlapping halves.

    A step is if halves made the nearest measured shape at least 15 % faster. Without a table no step is.
    """

    def __init__(self, table: OverlapTable | None = None) -> None:
        self._rows = () if table is None else table.rows

    @property
    def is_open(self) -> bool:
        """Whether any shape overlaps."""
        return any(row.gain >= LEAST_GAIN for row in self._rows)

    def has_decode(self, rows: int) -> bool:
        """Return whether a graph of this many decodes overlaps."""
        return self._has(rows, rows)

    def has_step(self, tokens: int, decodes: int) -> bool:
        """Return whether a step of this many tokens overlaps, some of them decodes."""
        # Decodes were measured in graphs; those that fit no graph are launched one by one, which was not measured.
        return tokens != decodes and self._has(tokens, decodes)

    def _has(self, tokens: int, decodes: int) -> bool:
        near: list[tuple[float, OverlapRow]] = []
        for row in self._rows:
            apart = abs(log2(tokens / row.tokens)), abs(log2((1 + decodes) / (1 + row.decodes)))
            is_alike = row.is_decode == (tokens == decodes)
            if is_alike and apart[0] <= log2(_TOKEN_REACH) and apart[1] <= log2(_DECODE_REACH):
                near.append((sum(apart), row))
        return bool(near) and min(near, key=lambda one: one[0])[1].gain >= LEAST_GAIN


def open_overlap_file(folder: str | None, facts: Facts) -> CacheFile[OverlapTable]:
    """Return the file of the table for these facts."""
    return CacheFile(folder, "overlap", facts, OverlapTable)


class OverlapBench:
    """Runs trial steps serially and overlapped, through the code that serves."""

    def __init__(
        self, model: Model, spec: KVSpec, slots: int, device: Device, fork: Fork, lane: Lane, clock: Clock
    ) -> None:
        """`slots`: of an arena made for this purpose, beside the null block. Errors: ConfigError."""
        if not isinstance(model, PhasedModel) or not model.is_capturable:
            raise ConfigError("calibrate.model", f"halves of steps do not overlap in {model.impl} code of this model")
        self._model = model
        self._phased: PhasedModel = model
        place = torch.device(device.name)
        layout = (slots + 1, spec.layers, spec.block_size, spec.kv_heads, spec.width)
        self.kv = torch.zeros(layout, dtype=model.precision.kv, device=place)
        self._block_size = spec.block_size
        self._context = min(_CONTEXT, model.max_model_len - 1)
        self._device = device
        self._overlap = Overlap(fork, lambda rows: True, lambda tokens, decodes: True)
        self._lane = lane
        self._clock = clock
        self._staging = open_staging(self.kv.device, lane, maps_host_memory=device.maps_host_memory)

    def shapes(self, max_tokens: int, max_num_seqs: int) -> Iterator[tuple[int, int]]:
        """Yield the tokens and decodes of the shapes that steps of this engine can have."""
        for rows in _DECODES:
            if rows <= max_num_seqs:
                yield rows, rows
        for tokens, decodes in _STEPS:
            has_slices = decodes <= max_num_seqs and tokens - decodes <= self._model.max_model_len
            if has_slices and MAX_MIXED_TOKENS < tokens <= max_tokens:
                yield tokens, decodes

    def gain(self, tokens: int, decodes: int) -> float:
        """Return the median of the time of a serial step over that of the overlapped step after it.

        Errors: DeviceError if a graph cannot be recorded.
        """
        batch, tables = self._batch(tokens, decodes)
        if tokens == decodes:
            serial, overlapped = self._decode(batch, tables), self._decode(batch, tables, self._overlap)
        else:
            serial, overlapped = self._eager(batch, tables), self._eager(batch, tables, self._overlap)
        for job in (serial, overlapped):  # compile and allocate
            self._time_s(job)
        return statistics.median(self._time_s(serial) / self._time_s(overlapped) for _ in range(_TURNS))

    def _batch(self, tokens: int, decodes: int) -> tuple[BatchInputs, DeviceTables]:
        """Return a batch of decodes of equal context and one prompt that writes the null block, and its tables."""
        prompt = tokens - decodes
        lengths = np.array([*[1] * decodes, *[prompt] * (prompt > 0)], np.int64)
        starts = np.array([*[self._context] * decodes, *[0] * (prompt > 0)], np.int64)
        blocks = -(-int((starts + lengths).max()) // self._block_size)
        # The stride is prime to almost every number of slots: neighbours are not adjacent in memory.
        tables = 1 + torch.arange(len(starts) * blocks) * 7919 % (self.kv.shape[0] - 1)
        on_device = DeviceTables(tables.view(len(starts), blocks).to(self.kv.device))
        ids = np.arange(tokens, dtype=np.int64) * 7919 % self._model.vocab_size
        return trial_batch(starts, lengths, blocks, ids), on_device

    def _decode(self, batch: BatchInputs, tables: DeviceTables, overlap: Overlap | None = None) -> Callable[[], Tensor]:
        recorder, rows = self._device.open_recorder(), len(batch.tokens)
        graphs = None if recorder is None else record_graphs(
            self._model, self.kv, rows, batch.num_blocks, self._lane, recorder, (rows,), lambda done, total: None,
            overlap,
        )  # fmt: skip
        if graphs is None:
            raise DeviceError("calibrate.no_graph", rows=rows)
        return lambda: graphs.run_no_sync(batch, rows, self._staging, tables)[0]

    def _eager(self, batch: BatchInputs, tables: DeviceTables, overlap: Overlap | None = None) -> Callable[[], Tensor]:
        said = torch.zeros(len(batch.slice_seqs), dtype=torch.int64, device=self.kv.device)
        last_tokens, staging = LastTokens(said, self._staging), self._staging

        def run() -> Tensor:
            if overlap is not None:
                return overlap.forward_no_sync(self._phased, batch, self.kv, last_tokens, staging, tables).hidden
            on_device = batch.upload_no_sync(staging, tables)
            return self._model.forward(last_tokens.fill_no_sync(batch, on_device), self.kv, on_device.state)

        return run

    def _time_s(self, job: Callable[[], Tensor]) -> float:
        @torch.inference_mode()
        def run() -> Tensor:
            return job()

        start_s = self._clock.now_s()
        self._lane.run(run).result()
        return self._clock.now_s() - start_s


def search_overlap(
    bench: OverlapBench, shapes: list[tuple[int, int]], on_row: Callable[[OverlapRow], None] = lambda row: None
) -> tuple[OverlapRow, ...]:
    """Measure the gain of every shape. Errors: DeviceError."""
    rows: list[OverlapRow] = []
    for tokens, decodes in shapes:
        rows.append(OverlapRow(tokens, decodes, round(bench.gain(tokens, decodes), 4)))
        on_row(rows[-1])
    return tuple(rows)


def calibrate_overlap(
    settings: EngineSettings,
    on_row: Callable[[OverlapRow], None],
    device: Device | None = None,
    clock: Clock | None = None,
) -> Path | None:
    """Measure which steps are faster as overlapping halves, and keep the table. Return the path of its file.

    Errors: ConfigError; DeviceError; OSError when the file cannot be written.
    """
    device = device or open_device(settings.device, settings.threads)
    settings = for_device(settings, device)
    place, fork = torch.device(device.name), device.open_fork()
    if fork is None or settings.enforce_eager:
        reason = "--enforce-eager excludes them" if settings.enforce_eager else f"--device {device.name} has no graphs"
        raise ConfigError("calibrate.overlap", f"overlapping halves need CUDA graphs: {reason}")
    attention = open_attention(settings.attention_backend, place, device.processors, device.capability)
    model = load_model(settings, place, attention)
    if isinstance(model, Decoder):
        route_products(settings, model, device)
    spec = kv_spec(model, settings.block_size)
    wanted = settings.sequences * -(-_CONTEXT // spec.block_size) + 1
    slots = max(64, min(wanted, int(_ARENA_SHARE * device.free_bytes()) // spec.block_bytes))
    lane = device.open_lane()
    clock = clock or MonotonicClock()
    bench = OverlapBench(model, spec, slots, device, fork, lane, clock)
    device.give_back_cached()  # this also waits for the zeroing of the arena, which was not queued on the lane
    measure_decodes(
        *(attention, model, bench.kv, settings.block_size, device, lane, clock, settings.sequences), has_graphs=True
    )
    shapes = list(bench.shapes(step_tokens(settings, device), settings.sequences))
    rows = search_overlap(bench, shapes, on_row)
    lane.close()
    file = open_overlap_file(settings.cache_folder, machine_facts(settings, model, spec, device))
    file.write(OverlapTable(identity=file.identity, rows=rows))
    return file.path


def open_overlap(settings: EngineSettings, model: Model, spec: KVSpec, device: Device) -> Overlap | None:
    """Return what overlaps by the stored table; None if nothing does."""
    if not wants_graphs(settings, model) or not isinstance(model, PhasedModel):
        return None
    gate = OverlapGate(open_overlap_file(settings.cache_folder, machine_facts(settings, model, spec, device)).read())
    fork = device.open_fork() if gate.is_open else None
    return None if fork is None else Overlap(fork, gate.has_decode, gate.has_step)
