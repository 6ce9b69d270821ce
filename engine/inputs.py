"""From a sealed nano-batch to the arrays of its forward."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import ForwardState
from scheduler.sequence import Sequence
from tiercel.ids import SeqId
from tiercel.plan import NanoBatch


class SequenceReader(Protocol):
    """The book of sequences, to read."""

    def __contains__(self, seq: object, /) -> bool: ...
    def __getitem__(self, seq: SeqId, /) -> Sequence: ...


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """One nano-batch, ready to run; built on the host without waiting for the step in flight.

    Tokens that the step in flight is still sampling are 0 here; the lane fills `tokens[unknown]` from the last
    token of `unknown_rows`.

    Shapes: tokens [T] int64; unknown, unknown_rows [U]; sample_at [N] (index into T), rows, positions,
            output_index [N] of the slices that sample.
    """

    tokens: NDArray[np.int64]
    unknown: NDArray[np.int64]
    unknown_rows: NDArray[np.int64]
    query_starts: tuple[int, ...]
    context_lengths: tuple[int, ...]
    block_tables: NDArray[np.int64]
    token_positions: NDArray[np.int64]
    slot_ids: NDArray[np.int64]
    slot_offsets: NDArray[np.int64]
    sample_at: NDArray[np.int64]
    rows: NDArray[np.int64]
    positions: NDArray[np.int64]
    output_index: NDArray[np.int64]
    seqs: tuple[SeqId, ...]  # of the slices that sample
    slice_seqs: tuple[SeqId, ...]  # of all slices

    def without(self, gone: frozenset[SeqId]) -> "BatchInputs | None":
        """The same without the slices of these sequences; None when none is left."""
        kept = np.array([seq not in gone for seq in self.slice_seqs])
        if not kept.any():
            return None
        lengths = np.diff(self.query_starts)
        token_kept = np.repeat(kept, lengths)
        new_at = np.cumsum(token_kept) - 1
        unknown_kept = token_kept[self.unknown]
        sample_kept = token_kept[self.sample_at]
        context_lengths = np.array(self.context_lengths)[kept]
        return BatchInputs(
            tokens=self.tokens[token_kept],
            unknown=new_at[self.unknown[unknown_kept]],
            unknown_rows=self.unknown_rows[unknown_kept],
            query_starts=(0, *np.cumsum(lengths[kept]).tolist()),
            context_lengths=tuple(context_lengths.tolist()),
            block_tables=self.block_tables[kept],
            token_positions=self.token_positions[token_kept],
            slot_ids=self.slot_ids[token_kept],
            slot_offsets=self.slot_offsets[token_kept],
            sample_at=new_at[self.sample_at[sample_kept]],
            rows=self.rows[sample_kept],
            positions=self.positions[sample_kept],
            output_index=self.output_index[sample_kept],
            seqs=tuple(seq for seq in self.seqs if seq not in gone),
            slice_seqs=tuple(seq for seq in self.slice_seqs if seq not in gone),
        )

    def state(self, device: torch.device) -> ForwardState:
        """What attention needs, on the device."""
        return ForwardState(
            query_starts=self.query_starts,
            context_lengths=self.context_lengths,
            block_tables=_upload(self.block_tables, device),
            positions=_upload(self.token_positions, device),
            slot_ids=_upload(self.slot_ids, device),
            slot_offsets=_upload(self.slot_offsets, device),
            device_query_starts=_upload(np.array(self.query_starts, np.int32), device),
            device_context_lengths=_upload(np.array(self.context_lengths, np.int32), device),
        )


def build_inputs(
    batch: NanoBatch,
    sequences: SequenceReader,
    row_by_seq: dict[SeqId, int],
    tables: NDArray[np.int64],
    block_size: int,
) -> BatchInputs:
    """Arrays of one nano-batch. Cost: a short loop over its slices, the rest in numpy."""
    slices = batch.slices
    rows = np.array([row_by_seq[piece.seq] for piece in slices], np.int64)
    starts = np.array([piece.start for piece in slices], np.int64)
    lengths = np.array([piece.length for piece in slices], np.int64)
    ends = starts + lengths
    query_ends = np.cumsum(lengths)
    query_starts = query_ends - lengths
    num_tokens = int(query_ends[-1])
    token_rows = np.repeat(rows, lengths)
    token_positions = np.arange(num_tokens) + np.repeat(starts - query_starts, lengths)

    tokens = np.zeros(num_tokens, np.int64)
    unknown: list[int] = []
    prompts: list[int] = []
    at = 0
    for index, piece in enumerate(slices):
        sequence = sequences[piece.seq]
        prompts.append(sequence.num_prompt)
        known = sequence.tokens
        if piece.length > 1:
            # A copy of the slice: a view would forbid the array to grow.
            chunk = known[piece.start : piece.start + piece.length]
            tokens[at : at + piece.length] = np.frombuffer(chunk, np.uint32)
        elif piece.start < len(known):
            tokens[at] = known[piece.start]
        else:
            unknown.append(index)
        at += piece.length

    sampling = np.array([index for index, piece in enumerate(slices) if piece.samples], np.int64)
    widest = -(-int(ends.max()) // block_size)
    unknown_at = np.array(unknown, np.int64)
    return BatchInputs(
        tokens=tokens,
        unknown=query_starts[unknown_at],
        unknown_rows=rows[unknown_at],
        query_starts=(0, *query_ends.tolist()),
        context_lengths=tuple(ends.tolist()),
        block_tables=tables[rows, :widest],
        token_positions=token_positions,
        slot_ids=tables[token_rows, token_positions // block_size],
        slot_offsets=token_positions % block_size,
        sample_at=query_ends[sampling] - 1,
        rows=rows[sampling],
        positions=ends[sampling],
        output_index=ends[sampling] - np.array(prompts, np.int64)[sampling],
        seqs=tuple(slices[index].seq for index in sampling.tolist()),
        slice_seqs=tuple(piece.seq for piece in slices),
    )


def _upload(values: NDArray[np.integer], device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)
