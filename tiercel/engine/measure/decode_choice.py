"""The choice of the kernel for single tokens beside FlashAttention-3, by measuring both at the start."""

import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from tiercel.device.base import Device, Lane
from tiercel.device.graph import GraphRecorder
from tiercel.engine.attention.fa3 import Fa3Attention
from tiercel.engine.forward.state import ForwardState
from tiercel.engine.models.base import Model
from tiercel.values.clock import Clock
from tiercel.values.errors import DeviceError

log = logging.getLogger(__name__)

T = TypeVar("T")

_ROWS = (256, 32)  # of decodes, the largest first as a recorder needs it; all count the same
_CONTEXT = 1024  # tokens of each
_TURNS = 3  # of both kernels, alternating
_REPEATS = 4  # of a decode in one turn

DecodeMs = Callable[[], float]
"""Returns the milliseconds of one decode, with the kernel that was in use when it was prepared."""

Prepare = Callable[[int], DecodeMs]
"""Prepares a decode of so many rows, with the kernel that is in use."""


def choose_decodes(attention: Fa3Attention, prepare: Prepare, sizes: Sequence[int]) -> float | None:
    """Leave decodes to the spare of `attention` if it computes them faster.

    Return the time of FlashAttention-3 over that of the spare: the geometric mean over the sizes, of medians. Without a
    spare or sizes, or if a decode cannot be measured, nothing changes, and None is returned.
    Effects: `attention.leaves_decodes`. Graphs have to be recorded after this.
    """
    if not attention.has_spare or not sizes:
        return None
    try:
        times: dict[tuple[bool, int], list[float]] = {}
        decodes: dict[tuple[bool, int], DecodeMs] = {}
        for size in sizes:
            for is_left in (False, True):
                attention.leaves_decodes = is_left
                decodes[is_left, size] = prepare(size)
        for _ in range(_TURNS):
            for kind, decode in decodes.items():
                attention.leaves_decodes = kind[0]
                times.setdefault(kind, []).append(decode())
    except DeviceError as exc:
        attention.leaves_decodes = False
        log.warning("decodes not measured: FlashAttention-3 computes them error=%s", exc)
        return None
    median_by_kind = {kind: statistics.median(ms) for kind, ms in times.items()}
    ratio = statistics.geometric_mean(median_by_kind[False, size] / median_by_kind[True, size] for size in sizes)
    attention.leaves_decodes = ratio > 1
    log.info("decodes measured fa3_ms_over_spare=%.3f chosen=%s", ratio, "spare" if ratio > 1 else attention.source)
    return ratio


class DecodeTrial:
    """Decodes of the whole model on the engine's own arena, in graphs if the device records them."""

    def __init__(
        self, model: Model, kv: Tensor, block_size: int, lane: Lane, clock: Clock, recorder: GraphRecorder | None
    ) -> None:
        """`recorder`: one of its own, whose graphs are dropped after the trial; None: launched kernel by kernel."""
        self._model = model
        self._kv = kv
        self._block_size = block_size
        self._lane = lane
        self._clock = clock
        self._recorder = recorder

    def prepare(self, rows: int) -> DecodeMs:
        """Prepare a decode with blocks all over the arena. Errors: DeviceError.

        Effects: the null block is written.
        """
        job = self._job(rows)
        if self._recorder is None:
            self._run(job)  # compiles kernels
            return lambda: self._ms(job)
        recorder = self._recorder
        graph = self._run(lambda: recorder.record(job))
        return lambda: self._ms(graph.replay)

    def _job(self, rows: int) -> Callable[[], Tensor]:
        model, kv = self._model, self._kv
        context = min(_CONTEXT, model.max_model_len)
        blocks = -(-context // self._block_size)
        tables = torch.randint(
            min(1, kv.shape[0] - 1), kv.shape[0], (rows, blocks), generator=torch.Generator().manual_seed(0)
        ).to(kv.device)
        starts, ends = [context - 1] * rows, [context] * rows
        first = ForwardState.of_slices(tables, starts, ends, self._block_size, writes_null_block=True)
        tokens = torch.zeros(rows, dtype=torch.int64).to(kv.device)  # waits: the lane does not wait for this stream

        @torch.inference_mode()
        def decode() -> Tensor:
            state = replace(first)  # a new object, because backends cache the facts of a step by its state
            return model.forward(tokens, kv, state)

        return decode

    def _ms(self, job: Callable[[], Tensor]) -> float:
        def repeat() -> Callable[[], float]:
            timer = self._lane.start_timer(self._clock)
            for _ in range(_REPEATS):
                job()
            timer.stop()
            return timer.ms

        return self._run(repeat)() / _REPEATS

    def _run(self, job: Callable[[], T]) -> T:
        try:
            return self._lane.run(job).result()
        except RuntimeError as exc:
            raise DeviceError("device.measure_failed", f"{type(exc).__name__}: {exc}") from exc


def measure_decodes(
    attention: object, model: Model, kv: Tensor, block_size: int, device: Device, lane: Lane, clock: Clock,
    most_rows: int, *, has_graphs: bool,
) -> None:  # fmt: skip
    """Choose the kernel for decodes, if the attention is FlashAttention-3 beside another backend.

    Cost: under a second on a GPU; nothing with other backends.
    """
    if not isinstance(attention, Fa3Attention) or not attention.has_spare:
        return
    recorder = device.open_recorder() if has_graphs else None
    trial = DecodeTrial(model, kv, block_size, lane, clock, recorder)
    sizes = [size for size in _ROWS if size <= most_rows] or [most_rows]
    choose_decodes(attention, trial.prepare, sizes)
    del trial, recorder
    device.give_back_cached()
