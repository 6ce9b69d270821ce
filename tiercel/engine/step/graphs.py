"""CUDA graphs of decode steps, one for each of several numbers of rows.

A forward is hundreds of small launches, and with few rows the host needs longer for them than the device. A graph is
one launch, but of fixed shapes at fixed addresses. There is a graph for each of several numbers of rows; all of them
read the same static inputs, and a batch runs in the smallest graph that has enough rows. The remaining rows are
padding: one token at position 0 that is written to the null block.

The order of the lane's queue protects memory. What overwrites the static inputs is queued behind the replay that reads
them, however many steps are launched ahead. The logits of a replay are overwritten by the next replay, and sampling is
queued between the two. The host side of the inputs is protected by the marks of `engine.step.staging`.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiercel.device.base import Lane
from tiercel.device.graph import Graph, GraphRecorder
from tiercel.device.shortage import is_shortage
from tiercel.engine.forward.state import ForwardState
from tiercel.engine.models.base import Model
from tiercel.engine.models.phases import PhasedModel
from tiercel.engine.sampling import DrawColumn
from tiercel.engine.step.halves import Overlap
from tiercel.engine.step.inputs import BatchInputs
from tiercel.engine.step.staging import Staging, packed_bytes, unpack
from tiercel.engine.step.tables import DeviceTables
from tiercel.settings.settings import EngineSettings
from tiercel.values.errors import DeviceError

log = logging.getLogger(__name__)

MAX_GRAPH_ROWS = 512
"""Rows of the largest graph, as in vLLM. Every graph costs memory and time at the start, and with more rows computing
takes longer than launching. Not measured."""

_FIRST_SIZES = (1, 2, 4, 8)
_STRIDES = ((64, 8), (256, 16), (MAX_GRAPH_ROWS, 32))  # (up to this many rows, distance of two sizes)
_TOKENS, _ROWS, _POSITIONS, _SLOT_IDS, _SLOT_OFFSETS = range(5)  # columns of the static inputs
_ALIGNED_ROWS = 8  # of int64: each column of the static inputs begins on a multiple of 64 bytes


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Return the rows of the graphs for batches of up to `max_rows`, in ascending order.

    The sizes are 1, 2, 4, 8, then every 8 up to 64, every 16 up to 256 and every 32 up to 512; the last one is
    `max_rows` if that is at most 512. Beyond 32 rows at most a fifth of the rows is padding.
    """
    end = min(max_rows, MAX_GRAPH_ROWS)
    sizes: list[int] = list(_FIRST_SIZES)
    for last, stride in _STRIDES:
        sizes += range(sizes[-1] + stride, last + 1, stride)
    return (*sizes[: bisect_left(sizes, end)], end)


def wants_graphs(settings: EngineSettings, model: Model) -> bool:
    """Return whether decodes are to be recorded on a device that can record them."""
    return model.is_capturable and not settings.enforce_eager


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """The input tensors of all graphs; a graph of m rows reads the first m rows of each.

    Shapes: columns [5, rows] int64: tokens, rows of the runner, positions, slot ids, slot offsets; lengths [rows]
            int32; is_unknown [rows] bool; draws [rows, len(DrawColumn)] int32, not read by graphs; these four are parts
            of buffer [bytes] uint8. starts [rows + 1] int32, never written; tables [rows, blocks] int64, of the longest
            context. Unused columns of tables and rows of padding hold valid slots of earlier batches; no length reaches
            such a column. A row of padding reads one token of such a slot, and its result is discarded: rows are
            independent.
    """

    buffer: Tensor
    columns: Tensor
    lengths: Tensor
    is_unknown: Tensor
    draws: Tensor
    starts: Tensor
    tables: Tensor

    @classmethod
    def open(cls, max_rows: int, max_blocks: int, device: torch.device) -> "StaticInputs":
        """Allocate the tensors, with padding in every row."""
        rows = -(-max_rows // _ALIGNED_ROWS) * _ALIGNED_ROWS
        arrays = _padding(rows)
        buffer = torch.zeros(packed_bytes(arrays), dtype=torch.uint8, device=device)
        columns, lengths, is_unknown, draws = unpack(buffer, arrays)
        lengths.fill_(1)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        tables = torch.zeros(rows, max_blocks, dtype=torch.int64, device=device)
        return cls(buffer, columns, lengths, is_unknown, draws, starts, tables)

    @property
    def nbytes(self) -> int:
        """Bytes on the device; on the device `meta`, the bytes that they would take."""
        return self.buffer.nbytes + self.starts.nbytes + self.tables.nbytes

    def fill_no_sync(
        self, batch: BatchInputs, staging: Staging, tables: DeviceTables, draws: NDArray[np.int32] | None = None
    ) -> None:
        """Fill the inputs of a decode, for a graph of at least as many rows.

        Shapes: draws [n, len(DrawColumn)], the parameters of the draws of its rows.
        Cost:   one upload, and one kernel that gathers the block tables of the rows on the device.
        """
        count = len(batch.tokens)
        columns, lengths, is_unknown, all_draws = _padding(self.columns.shape[1])
        columns[:, :count] = batch.tokens, batch.rows, batch.token_positions, batch.slot_ids, batch.slot_offsets
        lengths[:count] = batch.context_lengths
        is_unknown[:count] = batch.is_unknown
        if draws is not None:
            all_draws[:count] = draws
        staging.upload_no_sync((columns, lengths, is_unknown, all_draws), self.buffer, tables)
        blocks = batch.num_blocks
        tables.gather_no_sync(self.columns[_ROWS, :count], blocks, out=self.tables[:count, :blocks])

    def tokens(self, size: int, last_tokens: Tensor) -> Tensor:
        """Return the input tokens: those known to the host, else the last token of the row on the device."""
        known, rows = self.columns[_TOKENS, :size], self.columns[_ROWS, :size]
        return torch.where(self.is_unknown[:size], last_tokens.index_select(0, rows), known)

    def state(self, size: int) -> ForwardState:
        """Return the state for attention. Its host side describes padding; the real lengths are on the device."""
        return ForwardState(
            query_starts=tuple(range(size + 1)),
            context_lengths=(1,) * size,
            block_tables=self.tables[:size],
            positions=self.columns[_POSITIONS, :size],
            slot_ids=self.columns[_SLOT_IDS, :size],
            slot_offsets=self.columns[_SLOT_OFFSETS, :size],
            device_query_starts=self.starts[: size + 1],
            device_context_lengths=self.lengths[:size],
        )


class DecodeGraphs:
    """The recorded graphs.

    A batch whose own size was not recorded is launched kernel by kernel: a far larger graph would be slower.
    """

    def __init__(
        self,
        inputs: StaticInputs,
        last_tokens: Tensor,
        sizes: Sequence[int],
        graph_by_size: Mapping[int, Graph],
        halved: Sequence[int] = (),
    ) -> None:
        """`halved`: rows of the graphs that compute two halves that overlap."""
        self.halved = tuple(halved)
        self.last_tokens = last_tokens  # [rows of the runner] int64, read by the graphs, written after sampling
        self._inputs = inputs
        self._sizes = sizes
        self._graph_by_size = graph_by_size

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of the recorded graphs, in ascending order."""
        return tuple(sorted(self._graph_by_size))

    def size_of(self, batch: BatchInputs) -> int | None:
        """Return the rows of the graph for this nano-batch; None if it has to be launched kernel by kernel."""
        if not batch.is_decode or batch.reads:  # a graph keeps no final states
            return None
        at = bisect_left(self._sizes, len(batch.tokens))
        return self._sizes[at] if at < len(self._sizes) else None

    def run_no_sync(
        self,
        batch: BatchInputs,
        size: int,
        staging: Staging,
        tables: DeviceTables,
        draws: NDArray[np.int32] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queue a nano-batch in the graph that `size_of` has returned.

        Shapes: returns logits [n, vocab], their rows [n] int64 and, on the device, the given parameters of draws
                [n, len(DrawColumn)] int32; all are valid until the next call.
        """
        self._inputs.fill_no_sync(batch, staging, tables, draws)
        logits = self._graph_by_size[size].replay()
        count = len(batch.tokens)
        return logits[:count], self._inputs.columns[_ROWS, :count], self._inputs.draws[:count]


def record_graphs(
    model: Model,
    kv: Tensor,
    max_rows: int,
    max_blocks: int,
    lane: Lane,
    recorder: GraphRecorder,
    sizes: Sequence[int],
    on_progress: Callable[[int, int], None],
    overlap: Overlap | None = None,
) -> DecodeGraphs | None:
    """Record a decode, from the tokens to the logits, for each of the sizes. Runs as a job of the lane.

    The largest size is recorded first, because the others can use its memory. `on_progress` is called with the number
    of sizes that are done, and their total. Returns None, and logs the error, if a recording fails or there is no
    memory for the inputs: the graphs recorded before are dropped.

    `overlap`: its sizes are recorded as two halves that overlap.

    Shapes:  kv: see `Model.forward`; max_rows: of the runner; max_blocks: of the longest context.
    Cost:    four forwards per size, one of them without computing.
    Effects: the null block is written.
    """

    @torch.inference_mode()
    def record() -> DecodeGraphs | None:
        try:
            inputs = StaticInputs.open(max(sizes), max_blocks, kv.device)
            last_tokens = torch.zeros(max_rows, dtype=torch.int64, device=kv.device)
        except (RuntimeError, MemoryError) as exc:
            if not is_shortage(exc):
                raise
            log.warning("no graphs: every step is launched kernel by kernel error=%s", exc)
            return None
        graph_by_size: dict[int, Graph] = {}
        for size in sorted(sizes, reverse=True):
            on_progress(len(graph_by_size), len(sizes))
            try:
                graph_by_size[size] = recorder.record(_decode(model, kv, last_tokens, inputs, size, overlap))
            except DeviceError as exc:
                log.warning("no graphs: every step is launched kernel by kernel failed_rows=%d error=%s", size, exc)
                return None
        halved = [size for size in sorted(sizes) if _is_halved(model, size, overlap)]
        return DecodeGraphs(inputs, last_tokens, sorted(sizes), graph_by_size, halved)

    return lane.run(record).result()


def _decode(
    model: Model, kv: Tensor, last_tokens: Tensor, inputs: StaticInputs, size: int, overlap: Overlap | None
) -> Callable[[], Tensor]:
    def halves() -> Tensor:
        assert overlap is not None and isinstance(model, PhasedModel)
        return model.logits(overlap.decode(model, inputs.tokens(size, last_tokens), kv, inputs.state(size)))

    def decode() -> Tensor:
        # Every run gets a state of its own. Backends cache facts of a step by its state; facts cached by a warm-up
        # run would be missing in the recording, and would have other lengths at the replay.
        state = inputs.state(size)
        return model.logits(model.forward(inputs.tokens(size, last_tokens), kv, state))

    return halves if _is_halved(model, size, overlap) else decode


def _is_halved(model: Model, size: int, overlap: Overlap | None) -> bool:
    return overlap is not None and isinstance(model, PhasedModel) and size > 1 and overlap.has_decode(size)


def _padding(rows: int) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.bool_], NDArray[np.int32]]:
    """Return columns, lengths, is_unknown and draws of rows of padding."""
    draws = np.zeros((rows, len(DrawColumn)), np.int32)
    return np.zeros((5, rows), np.int64), np.ones(rows, np.int32), np.zeros(rows, np.bool_), draws
