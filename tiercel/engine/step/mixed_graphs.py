"""CUDA graphs of small steps that compute prompts, alone or beside decodes: one for each of several numbers of tokens.

The host needs 5 to 7 ms to launch the kernels of such a step one by one (an estimate for a model of 32 layers), the
device less than that up to some hundred tokens. A graph of the whole forward is possible because no launch depends on
how the tokens are divided into slices: grids and scratch memory follow from the number of tokens and of rows, and the
kernels read the slices from device memory ([decision 51]). The graph ends with the final states; the head, sampling and
reads of prompts are launched behind it, for the tokens that need them.

Padding: tokens behind the last slice are written to the null block and belong to no slice, so attention leaves them
out; rows behind the last sequence have slices without tokens. The states of padding are never read. The order of the
lane's queue protects memory as described in `engine.step.graphs`.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiercel.device.base import Lane
from tiercel.device.graph import Graph, GraphRecorder
from tiercel.device.shortage import is_shortage
from tiercel.engine.forward.state import ForwardState
from tiercel.engine.models.base import Model
from tiercel.engine.sampling import DrawColumn
from tiercel.engine.step.inputs import BatchInputs
from tiercel.engine.step.staging import Staging, packed_bytes, unpack
from tiercel.engine.step.tables import DeviceTables
from tiercel.values.errors import DeviceError
from tiercel.values.ids import SeqId

log = logging.getLogger(__name__)

MAX_MIXED_TOKENS = 512
"""Tokens of the largest graph: with more, computing is expected to take longer than launching. Not measured."""

_FIRST_SIZE, _STRIDE = 16, 32  # tokens
_TOKENS, _ROWS, _POSITIONS, _SLOT_IDS, _SLOT_OFFSETS, _SAMPLE_AT, _SAMPLED_ROWS = range(7)  # columns of the inputs
_ALIGNED_TOKENS = 8  # of int64: each column of the inputs begins on a multiple of 64 bytes


def mixed_sizes(step_tokens: int) -> tuple[int, ...]:
    """Return the tokens of the graphs for steps of up to `step_tokens`, in ascending order: 16, then every 32 to 512.

    The last size is `step_tokens` if that is at most 512.
    """
    end = min(step_tokens, MAX_MIXED_TOKENS)
    sizes = (_FIRST_SIZE, *range(_STRIDE, end, _STRIDE))
    return (*(size for size in sizes if size < end), end)


class FinalStates(NamedTuple):
    """The final states of a forward, and what is drawn from them.

    Shapes: hidden [at least T, hidden]; sample_at, the places of the sampled tokens, and rows [N] int64; draws [N,
            len(DrawColumn)] int32, None if the parameters are not on the device.
    """

    hidden: Tensor
    sample_at: Tensor
    rows: Tensor
    draws: Tensor | None


@dataclass(frozen=True, slots=True)
class MixedInputs:
    """The input tensors of all graphs of mixed steps; a graph of T tokens reads the first T columns of each.

    Shapes: columns [7, tokens] int64: tokens, rows of the runner, positions, slot ids, slot offsets, then for sampled
            tokens their index and row; slice_rows [rows] int64; starts [rows + 1] and lengths [rows] int32; is_unknown
            [tokens] bool; draws [tokens, len(DrawColumn)] int32, not read by graphs; these are parts of buffer [bytes]
            uint8. tables [rows, blocks] int64, of the longest context, with stale but valid slots in unused columns.
            There is one row more than the runner has; it is padding.
    """

    buffer: Tensor
    columns: Tensor
    slice_rows: Tensor
    starts: Tensor
    lengths: Tensor
    is_unknown: Tensor
    draws: Tensor
    tables: Tensor

    @classmethod
    def open(cls, max_tokens: int, max_rows: int, max_blocks: int, device: torch.device) -> "MixedInputs":
        """Allocate the tensors, with padding everywhere."""
        tokens = -(-max_tokens // _ALIGNED_TOKENS) * _ALIGNED_TOKENS
        rows = max_rows + 1
        arrays = _padding(tokens, rows, 0)
        buffer = torch.zeros(packed_bytes(arrays), dtype=torch.uint8, device=device)
        columns, slice_rows, starts, lengths, is_unknown, draws = unpack(buffer, arrays)
        tables = torch.zeros(rows, max_blocks, dtype=torch.int64, device=device)
        return cls(buffer, columns, slice_rows, starts, lengths, is_unknown, draws, tables)

    @property
    def nbytes(self) -> int:
        """Bytes on the device; on the device `meta`, the bytes that they would take."""
        return self.buffer.nbytes + self.tables.nbytes

    def rows_of(self, size: int) -> int:
        """Return the rows of a graph of this many tokens: as many as a step may have slices, and one of padding."""
        return min(size, len(self.tables) - 1) + 1

    def fill_no_sync(
        self, batch: BatchInputs, staging: Staging, tables: DeviceTables, draws: NDArray[np.int32] | None = None
    ) -> None:
        """Fill the inputs of a step, for a graph of at least as many tokens.

        Shapes: draws [N, len(DrawColumn)], the parameters of the draws of its sampled tokens.
        Cost:   one upload, and one kernel that gathers the block tables of the slices on the device.
        """
        count, sampled, slices = len(batch.tokens), len(batch.sample_at), len(batch.slice_rows)
        arrays = _padding(self.columns.shape[1], len(self.tables), count)
        columns, slice_rows, starts, lengths, is_unknown, all_draws = arrays
        columns[:_SAMPLE_AT, :count] = (
            batch.tokens, batch.token_rows, batch.token_positions, batch.slot_ids, batch.slot_offsets
        )  # fmt: skip
        columns[_SAMPLE_AT:, :sampled] = batch.sample_at, batch.rows
        slice_rows[:slices] = batch.slice_rows
        starts[: slices + 1] = batch.query_starts
        lengths[:slices] = batch.context_lengths
        is_unknown[:count] = batch.is_unknown
        if draws is not None:
            all_draws[:sampled] = draws
        staging.upload_no_sync(arrays, self.buffer, tables)
        blocks = batch.num_blocks
        tables.gather_no_sync(self.slice_rows[:slices], blocks, out=self.tables[:slices, :blocks])

    def tokens(self, size: int, last_tokens: Tensor) -> Tensor:
        """Return the input tokens: those known to the host, else the last token of the row on the device."""
        known, rows = self.columns[_TOKENS, :size], self.columns[_ROWS, :size]
        return torch.where(self.is_unknown[:size], last_tokens.index_select(0, rows), known)

    def sampled(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the places of the sampled tokens among all tokens, their rows and draws. Shapes: see `FinalStates`."""
        return self.columns[_SAMPLE_AT, :count], self.columns[_SAMPLED_ROWS, :count], self.draws[:count]

    def state(self, size: int) -> ForwardState:
        """Return the state for attention. The real slices are on the device.

        The host side bounds them for backends that choose kernels and grids by it: a slice of all tokens, then slices
        of two tokens, as many in all as a step may have slices, and one of a single token. No step has a longer slice,
        more slices of several tokens, or more tiles of them. It describes more tokens than there are.
        """
        rows = self.rows_of(size)
        return ForwardState(
            query_starts=(0, *range(size, size + 2 * rows - 3, 2), size + 2 * rows - 3),
            context_lengths=(1,) * rows,
            block_tables=self.tables[:rows],
            positions=self.columns[_POSITIONS, :size],
            slot_ids=self.columns[_SLOT_IDS, :size],
            slot_offsets=self.columns[_SLOT_OFFSETS, :size],
            device_query_starts=self.starts[: rows + 1],
            device_context_lengths=self.lengths[:rows],
        )


class MixedGraphs:
    """The recorded graphs of mixed steps."""

    def __init__(self, inputs: MixedInputs, graph_by_size: Mapping[int, Graph]) -> None:
        self.sizes = tuple(sorted(graph_by_size))  # tokens of the graphs, in ascending order
        self._inputs = inputs
        self._graph_by_size = graph_by_size

    def size_of(self, batch: BatchInputs) -> int | None:
        """Return the tokens of the graph for this nano-batch; None if it has to be launched kernel by kernel."""
        at = bisect_left(self.sizes, len(batch.tokens))
        return self.sizes[at] if at < len(self.sizes) else None

    def run_no_sync(
        self,
        batch: BatchInputs,
        size: int,
        staging: Staging,
        tables: DeviceTables,
        draws: NDArray[np.int32] | None = None,
    ) -> FinalStates:
        """Queue a nano-batch in the graph that `size_of` has returned. The result is valid until the next call.

        Shapes: hidden [size, hidden], of which the first T are those of the batch.
        """
        self._inputs.fill_no_sync(batch, staging, tables, draws)
        return FinalStates(self._graph_by_size[size].replay(), *self._inputs.sampled(len(batch.sample_at)))


def record_mixed_graphs(
    model: Model,
    kv: Tensor,
    last_tokens: Tensor,
    max_blocks: int,
    lane: Lane,
    recorder: GraphRecorder,
    sizes: Sequence[int],
    on_progress: Callable[[int, int], None],
) -> MixedGraphs | None:
    """Record a forward, from the tokens to the final states, for each number of tokens. Runs as a job of the lane.

    The largest size is recorded first, because the others can use its memory. `on_progress` is called with the number
    of sizes that are done, and their total. Returns None, and logs the error, if a recording fails or there is no
    memory for the inputs: the graphs recorded before are dropped.

    Shapes:  kv: see `Model.forward`; last_tokens [rows of the runner] int64, those of `DecodeGraphs`; max_blocks: of
             the longest context.
    Cost:    four forwards per size, one of them without computing.
    Effects: the null block is written.
    """

    @torch.inference_mode()
    def record() -> MixedGraphs | None:
        graph_by_size: dict[int, Graph] = {}
        try:
            inputs = MixedInputs.open(max(sizes), len(last_tokens), max_blocks, kv.device)
            for size in sorted(sizes, reverse=True):
                on_progress(len(graph_by_size), len(sizes))
                graph_by_size[size] = recorder.record(_forward(model, kv, last_tokens, inputs, size))
        except (RuntimeError, MemoryError, DeviceError) as exc:
            if not isinstance(exc, DeviceError) and not is_shortage(exc):
                raise
            log.warning("no graphs: every step is launched kernel by kernel tokens=%s error=%s", sizes, exc)
            return None
        return MixedGraphs(inputs, graph_by_size)

    return lane.run(record).result()


def _forward(model: Model, kv: Tensor, last_tokens: Tensor, inputs: MixedInputs, size: int) -> Callable[[], Tensor]:
    def forward() -> Tensor:
        # Every run gets a state of its own, as in `engine.step.graphs`.
        return model.forward(inputs.tokens(size, last_tokens), kv, inputs.state(size))

    return forward


def trial_batch(
    starts: NDArray[np.int64], lengths: NDArray[np.int64], num_blocks: int, tokens: NDArray[np.int64]
) -> BatchInputs:
    """Return slices for measuring that write the null block, all sample, and read the first rows of `DeviceTables`.

    Shapes: starts and lengths [S]; tokens [T].
    """
    count, ends = len(starts), np.cumsum(lengths)
    rows = np.arange(count)
    zeros = np.zeros(len(tokens), np.int64)
    seqs = tuple(map(SeqId, range(count)))
    return BatchInputs(
        tokens=tokens,
        is_unknown=np.zeros(len(tokens), np.bool_),
        token_rows=np.repeat(rows, lengths),
        token_positions=np.arange(len(tokens)) + np.repeat(starts - (ends - lengths), lengths),
        slot_ids=zeros,
        slot_offsets=zeros,
        query_starts=np.concatenate(([0], ends)).astype(np.int32),
        context_lengths=(starts + lengths).astype(np.int32),
        slice_rows=rows,
        num_blocks=num_blocks,
        block_tables=None,
        sample_at=ends - 1,
        rows=rows,
        positions=starts + lengths,
        output_index=np.zeros(count, np.int64),
        seqs=seqs,
        slice_seqs=seqs,
    )


def _padding(
    tokens: int, rows: int, end: int
) -> tuple[
    NDArray[np.int64], NDArray[np.int64], NDArray[np.int32], NDArray[np.int32], NDArray[np.bool_], NDArray[np.int32]
]:
    """Return columns, slice_rows, starts, lengths, is_unknown and draws of padding only.

    `end`: the tokens of all slices before it.
    """
    return (
        np.zeros((7, tokens), np.int64),
        np.zeros(rows, np.int64),
        np.full(rows + 1, end, np.int32),
        np.zeros(rows, np.int32),
        np.zeros(tokens, np.bool_),
        np.zeros((tokens, len(DrawColumn)), np.int32),
    )
