"""The arrays of a forward, built from a sealed nano-batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Protocol

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from tiercel.engine.forward.state import ForwardState
from tiercel.engine.step.prompt_reads import PromptRead, prompt_read
from tiercel.engine.step.staging import Staging
from tiercel.engine.step.tables import DeviceTables
from tiercel.scheduler.sequence import SequenceProgress
from tiercel.values.ids import SeqId
from tiercel.values.plan import NanoBatch, Slice


class SequenceReader(Protocol):
    """The book of sequences, read-only."""

    def __contains__(self, seq: object, /) -> bool: ...
    def __getitem__(self, seq: SeqId, /) -> SequenceProgress: ...


@dataclass(frozen=True, slots=True)
class DeviceInputs:
    """One nano-batch on the device. Shapes: those of `BatchInputs`, and of `DrawPlan` for draws."""

    tokens: Tensor
    is_unknown: Tensor
    token_rows: Tensor
    sample_at: Tensor
    rows: Tensor
    state: ForwardState
    draws: Tensor | None  # parameters of draws, if they were given


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """One nano-batch on the host, built without waiting for the step in flight.

    Tokens that the step in flight has not sampled yet are 0 and marked as unknown; the lane replaces them by the last
    token of their row. A slice with proposed tokens samples behind each of its tokens, so its row and sequence occur
    several times among those that sample.

    Shapes: tokens, token_rows, token_positions, slot_ids, slot_offsets [T] int64; is_unknown [T] bool; query_starts
            [S + 1], context_lengths [S] int32; slice_rows [S] int64; block_tables [S, num_blocks] int64, None if they
            are read from `DeviceTables`; sample_at [N] (index into T), rows, positions, output_index [N] int64 of the
            tokens that are sampled.
    """

    tokens: NDArray[np.int64]
    is_unknown: NDArray[np.bool_]
    token_rows: NDArray[np.int64]
    token_positions: NDArray[np.int64]
    slot_ids: NDArray[np.int64]
    slot_offsets: NDArray[np.int64]
    query_starts: NDArray[np.int32]
    context_lengths: NDArray[np.int32]
    slice_rows: NDArray[np.int64]
    num_blocks: int  # of the longest context
    block_tables: NDArray[np.int64] | None
    sample_at: NDArray[np.int64]
    rows: NDArray[np.int64]
    positions: NDArray[np.int64]
    output_index: NDArray[np.int64]
    seqs: tuple[SeqId, ...]  # of the tokens that are sampled
    slice_seqs: tuple[SeqId, ...]  # of all slices
    reads: tuple[PromptRead, ...] = ()  # in the order of the slices

    @property
    def is_decode(self) -> bool:
        """Whether every slice has one token and samples. The arrays of tokens and of sampling slices are then equal."""
        return len(self.tokens) == len(self.slice_seqs) == len(self.sample_at)

    def without(self, gone: frozenset[SeqId]) -> "BatchInputs | None":
        """Return the batch without the slices of these sequences; None if no slice is left."""
        kept = np.array([seq not in gone for seq in self.slice_seqs])
        if not kept.any():
            return None
        lengths = np.diff(self.query_starts)
        token_kept = np.repeat(kept, lengths)
        new_at = np.cumsum(token_kept) - 1
        sample_kept = token_kept[self.sample_at]
        return BatchInputs(
            tokens=self.tokens[token_kept],
            is_unknown=self.is_unknown[token_kept],
            token_rows=self.token_rows[token_kept],
            token_positions=self.token_positions[token_kept],
            slot_ids=self.slot_ids[token_kept],
            slot_offsets=self.slot_offsets[token_kept],
            query_starts=_starts(lengths[kept]),
            context_lengths=self.context_lengths[kept],
            slice_rows=self.slice_rows[kept],
            num_blocks=self.num_blocks,
            block_tables=None if self.block_tables is None else self.block_tables[kept],
            sample_at=new_at[self.sample_at[sample_kept]],
            rows=self.rows[sample_kept],
            positions=self.positions[sample_kept],
            output_index=self.output_index[sample_kept],
            seqs=tuple(seq for seq in self.seqs if seq not in gone),
            slice_seqs=tuple(seq for seq in self.slice_seqs if seq not in gone),
            reads=tuple(replace(read, at=int(new_at[read.at])) for read in self.reads if read.seq not in gone),
        )

    def upload_no_sync(
        self, staging: Staging, tables: DeviceTables | None = None, draws: NDArray[np.int32] | None = None
    ) -> DeviceInputs:
        """Move the batch to the device. Cost and effects: see `Staging.upload_no_sync`.

        `tables`: those that a batch without tables reads; a kernel gathers its rows.
        """
        arrays = [
            *(self.tokens, self.token_rows, self.token_positions, self.slot_ids, self.slot_offsets),
            *(self.sample_at, self.rows, self.query_starts, self.context_lengths, self.is_unknown),
            self.slice_rows if self.block_tables is None else self.block_tables,
        ]
        if draws is not None:
            arrays.append(draws)
        tokens, token_rows, positions, slot_ids, slot_offsets, sample_at, rows, *others = staging.upload_no_sync(
            arrays, tables=tables
        )
        starts, lengths, is_unknown, found, *rest = others
        if self.block_tables is None:
            assert tables is not None
            found = tables.gather_no_sync(found, self.num_blocks)
        state = ForwardState(
            query_starts=tuple(self.query_starts.tolist()),
            context_lengths=tuple(self.context_lengths.tolist()),
            block_tables=found,
            positions=positions,
            slot_ids=slot_ids,
            slot_offsets=slot_offsets,
            device_query_starts=starts,
            device_context_lengths=lengths,
        )
        return DeviceInputs(tokens, is_unknown, token_rows, sample_at, rows, state, rest[0] if rest else None)


def build_inputs(
    batch: NanoBatch,
    sequences: SequenceReader,
    row_by_seq: dict[SeqId, int],
    tables: NDArray[np.int64],
    block_size: int,
    *,
    has_tables: bool = True,
) -> BatchInputs:
    """Return the arrays of one nano-batch. Cost: a short loop over its slices; the rest is numpy.

    `has_tables`: whether the block tables of its sequences are among them.
    """
    slices = batch.slices
    seqs = tuple([piece.seq for piece in slices])
    known = [sequences[seq] for seq in seqs]
    rows = np.array([row_by_seq[seq] for seq in seqs], np.int64)
    starts = np.array([piece.start for piece in slices], np.int64)
    lengths = np.array([piece.length for piece in slices], np.int64)
    ends = starts + lengths
    query_ends = np.cumsum(lengths)
    query_starts = query_ends - lengths
    num_tokens = int(query_ends[-1])
    token_rows = np.repeat(rows, lengths)
    token_positions = np.arange(num_tokens) + np.repeat(starts - query_starts, lengths)

    tokens, is_unknown = np.zeros(num_tokens, np.int64), np.zeros(num_tokens, np.bool_)
    is_sampled_later = starts >= np.array([len(sequence.tokens) for sequence in known], np.int64)
    is_unknown[query_starts[is_sampled_later]] = True
    for index in np.flatnonzero(~is_sampled_later).tolist():
        at, piece = query_starts[index], slices[index]
        # A copy of the slice, because the array cannot grow while a view of it exists.
        chunk = known[index].tokens[piece.start : piece.start + piece.length]
        tokens[at : at + len(chunk)] = np.frombuffer(chunk, np.uint32)

    prompts = np.array([sequence.num_prompt for sequence in known], np.int64)
    samples = [piece.samples for piece in slices]
    sampling = slice(None) if all(samples) else np.flatnonzero(samples)
    sample_at, sampled_rows, sampled_ends = query_ends[sampling] - 1, rows[sampling], ends[sampling]
    sampled_seqs, output_index = tuple(compress(seqs, samples)), (ends - prompts)[sampling]
    if any(piece.proposed for piece in slices):
        counts = np.array([piece.num_sampled for piece in slices if piece.samples], np.int64)
        for at, piece in zip((query_ends - 1).tolist(), slices, strict=True):
            if piece.proposed:
                tokens[at + 1 - len(piece.proposed) : at + 1] = piece.proposed
        back = np.repeat(np.cumsum(counts), counts) - np.arange(counts.sum()) - 1  # tokens before the last of its slice
        sample_at, sampled_ends = np.repeat(sample_at, counts) - back, np.repeat(sampled_ends, counts) - back
        sampled_rows, output_index = np.repeat(sampled_rows, counts), np.repeat(output_index, counts) - back
        sampled_seqs = tuple(piece.seq for piece in slices for _ in range(piece.num_sampled))
    widest = -(-int(ends.max()) // block_size)
    return BatchInputs(
        tokens=tokens,
        is_unknown=is_unknown,
        token_rows=token_rows,
        token_positions=token_positions,
        slot_ids=tables[token_rows, token_positions // block_size],
        slot_offsets=token_positions % block_size,
        query_starts=_starts(lengths),
        context_lengths=ends.astype(np.int32),
        slice_rows=rows,
        num_blocks=widest,
        block_tables=tables[rows, :widest] if has_tables else None,
        sample_at=sample_at,
        rows=sampled_rows,
        positions=sampled_ends,
        output_index=output_index,
        seqs=sampled_seqs,
        slice_seqs=seqs,
        reads=_reads(known, slices, query_starts),
    )


def _reads(
    known: Sequence[SequenceProgress], slices: Sequence[Slice], query_starts: NDArray[np.int64]
) -> tuple[PromptRead, ...]:
    """Return what is to be read of the final states; nothing in nearly every nano-batch."""
    found = [
        prompt_read(sequence, piece, int(query_starts[index]))
        for index, (sequence, piece) in enumerate(zip(known, slices, strict=True))
        if sequence.read_end
    ]
    return tuple(read for read in found if read is not None)


def _starts(lengths: NDArray[np.integer]) -> NDArray[np.int32]:
    """Return the first token of each slice, and the end of the last slice. Shapes: lengths [S] -> [S + 1]."""
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    return starts
