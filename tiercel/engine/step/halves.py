"""A step as two halves that overlap: the attention of one beside the matrix products of the other.

Attention of decodes is bound by memory, products by arithmetic, so the two may share a device (NanoFlow, arXiv
2408.12757). The halves take turns in lockstep: while the attention of one is in the side queue, the products of the
other are in the lane's own, and both queues meet before the roles change. So no two products run at the same time, and
an attention finds everything that was queued before it complete: a slice may be cut between the halves, because the
keys of its first part are written before the attention of the second. Tokens are the same as those of the serial step,
as far as products do not depend on the number of rows.

Decodes overlap in their graphs (`engine.step.graphs`), larger steps are launched kernel by kernel. Both only where a
measured table says so ([decision 17]).
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiercel.device.fork import Fork
from tiercel.engine.forward.state import ForwardState
from tiercel.engine.models.phases import AttentionCall, PhasedModel, Phases
from tiercel.engine.step.inputs import BatchInputs
from tiercel.engine.step.last_tokens import LastTokens
from tiercel.engine.step.mixed_graphs import FinalStates
from tiercel.engine.step.staging import Staging
from tiercel.engine.step.tables import DeviceTables


def run_overlapped(first: Phases, second: Phases, fork: Fork) -> Tensor:
    """Run two forwards of one model, the first half a layer ahead, and return their final states.

    Each half holds its operands until the meeting after their last use (`AttentionCall`), as `Fork` demands.

    Shapes: returns [T + U, hidden].
    """
    call: AttentionCall | None = next(first)
    halves, ended = deque((second, first)), list[Tensor]()
    try:
        while call is not None:
            fork.meet()
            fork.aside(call.run)
            call = _advance(halves[0], ended)  # while the attention of the other half runs
            halves.rotate()
    finally:
        fork.meet()  # also after an error: what is queued aside ends before memory and blocks are used again
    _advance(second, ended)
    return torch.cat(ended)


def _advance(half: Phases, ended: list[Tensor]) -> AttentionCall | None:
    """Queue a half's products up to its next attention. At its end, add its states to `ended` and return None."""
    try:
        return next(half)
    except StopIteration as end:
        ended.append(end.value)
        return None


def cut_batch(batch: BatchInputs, at: int) -> tuple[BatchInputs, BatchInputs]:
    """Return the first `at` tokens of a batch and the others. A slice may be cut; its parts keep their order.

    The parts sample the tokens that are among theirs, and read no states of prompts. 0 < at < tokens.
    """
    starts, lengths = batch.query_starts, np.diff(batch.query_starts)
    last = int(np.searchsorted(starts, at - 1, side="right")) - 1  # the slice of the last token of the first part
    rest = int(starts[last + 1]) - at  # tokens of this slice in the second part
    begin = last if rest else last + 1  # the first slice of the second part
    left, right = lengths[: last + 1].copy(), lengths[begin:].copy()
    contexts = batch.context_lengths[: last + 1].copy()
    left[-1] -= rest
    contexts[-1] -= rest
    if rest:
        right[0] = rest
    is_first = batch.sample_at < at
    num_first = int(is_first.sum())  # of the sampled tokens, which are in the order of all tokens
    return (
        _part(batch, slice(0, at), slice(0, last + 1), left, contexts, slice(0, num_first)),
        _part(
            batch, slice(at, len(batch.tokens)), slice(begin, len(lengths)), right, batch.context_lengths[begin:],
            slice(num_first, len(batch.sample_at)),
        ),
    )  # fmt: skip


def _part(
    batch: BatchInputs,
    tokens: slice,
    slices: slice,
    lengths: NDArray[np.int32],
    contexts: NDArray[np.int32],
    sampled: slice,
) -> BatchInputs:
    return BatchInputs(
        tokens=batch.tokens[tokens],
        is_unknown=batch.is_unknown[tokens],
        token_rows=batch.token_rows[tokens],
        token_positions=batch.token_positions[tokens],
        slot_ids=batch.slot_ids[tokens],
        slot_offsets=batch.slot_offsets[tokens],
        query_starts=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        context_lengths=contexts,
        slice_rows=batch.slice_rows[slices],
        num_blocks=batch.num_blocks,
        block_tables=None if batch.block_tables is None else batch.block_tables[slices],
        sample_at=batch.sample_at[sampled] - tokens.start,
        rows=batch.rows[sampled],
        positions=batch.positions[sampled],
        output_index=batch.output_index[sampled],
        seqs=batch.seqs[sampled],
        slice_seqs=batch.slice_seqs[slices],
    )


def rows_of(state: ForwardState, start: int, end: int) -> ForwardState:
    """Return the state of the rows [start, end) of a decode, without a copy."""
    count, rows = end - start, slice(start, end)
    return ForwardState(
        query_starts=tuple(range(count + 1)),
        context_lengths=state.context_lengths[rows],
        block_tables=state.block_tables[rows],
        positions=state.positions[rows],
        slot_ids=state.slot_ids[rows],
        slot_offsets=state.slot_offsets[rows],
        device_query_starts=state.device_query_starts[: count + 1],
        device_context_lengths=state.device_context_lengths[rows],
    )


@dataclass(frozen=True, slots=True)
class Overlap:
    """The choice of steps that overlap, and the queue beside the lane's own.

    `has_decode(rows)`: whether the graph of this many rows overlaps. `has_step(tokens, decodes)`: whether a step does
    that is launched kernel by kernel.
    """

    fork: Fork
    has_decode: Callable[[int], bool]
    has_step: Callable[[int, int], bool]

    def decode(self, model: PhasedModel, tokens: Tensor, kv: Tensor, state: ForwardState) -> Tensor:
        """Run a decode of at least two rows as halves, the first of which has the odd row.

        Shapes: see `Model.forward`.
        """
        middle, end = -(-len(tokens) // 2), len(tokens)
        first, second = (
            model.phases(tokens[start:stop], kv, rows_of(state, start, stop))
            for start, stop in ((0, middle), (middle, end))
        )
        return run_overlapped(first, second, self.fork)

    def overlaps(self, batch: BatchInputs) -> bool:
        """Return whether a batch that no graph runs is launched as halves."""
        tokens = len(batch.tokens)
        return tokens > 1 and self.has_step(tokens, int((np.diff(batch.query_starts) == 1).sum()))

    def forward_no_sync(
        self,
        model: PhasedModel,
        batch: BatchInputs,
        kv: Tensor,
        last_tokens: LastTokens,
        staging: Staging,
        tables: DeviceTables | None,
        draws: NDArray[np.int32] | None = None,
    ) -> FinalStates:
        """Queue a batch as halves of equal tokens. Shapes: draws [N, len(DrawColumn)]."""
        first, second = cut_batch(batch, -(-len(batch.tokens) // 2))
        # The rows to sample are indices into the states of both halves together.
        first = replace(first, sample_at=batch.sample_at, rows=batch.rows)
        inputs = (first.upload_no_sync(staging, tables, draws), second.upload_no_sync(staging, tables))
        before, after = (
            model.phases(last_tokens.fill_no_sync(part, on_device), kv, on_device.state)
            for part, on_device in zip((first, second), inputs, strict=True)
        )
        hidden = run_overlapped(before, after, self.fork)
        return FinalStates(hidden, inputs[0].sample_at, inputs[0].rows, inputs[0].draws)
