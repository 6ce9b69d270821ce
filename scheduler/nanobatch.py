"""Nano-batches: how the slices of a step are cut into forwards, and whether cutting pays.

A nano-batch is one forward. On one lane every forward reads all weights anew, so a step is one nano-batch unless a cut
was measured to win on this machine (`tiercel calibrate`) or device memory is short.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import product
from math import log2
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from tiercel.plan import NanoBatch, Slice
from tiercel.scheduler.chunk import chunk_length

_MOST_PARTS = 16
_MOST_ROWS = 4096
_LEAST_TOKENS = 64  # of a step that is worth a look at the table
_LEAST_PART = 16  # tokens of a part of the prompts
_GAIN = 0.97  # of the whole step's time, at most, for a step that is cut
_REACH = 2.0  # beyond its ends the table speaks for shapes of so many times the size


class SplitShape(NamedTuple):
    """Slices as costs see them. Context is KV before the slices, of prompts and of decodes."""

    prefill_tokens: int
    prefill_context: int
    decodes: int
    decode_context: int


class Split(Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """A way to cut a step."""

    prompt_parts: Annotated[int, Meta(ge=1, le=_MOST_PARTS)] = 1  # nano-batches that the prompts' tokens fill evenly
    decode_parts: Annotated[int, Meta(ge=0, le=_MOST_PARTS)] = 0  # for decodes alone, first; 0: with the first prompts


WHOLE = Split()


class MeasuredSplit(Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """What a cut costs: its time over that of the whole step."""

    split: Split
    ratio: Annotated[float, Meta(gt=0, le=1e3)]


_Count = Annotated[int, Meta(ge=0, le=1 << 40)]


class SplitRow(Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """One measured shape and its cuts; the whole step is 1 and not among them."""

    prefill_tokens: _Count
    decodes: _Count
    context_tokens: _Count
    cuts: Annotated[tuple[MeasuredSplit, ...], Meta(max_length=_MOST_PARTS * _MOST_PARTS)]


class SplitTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the search found out: every row that it measured, whichever cut is best there."""

    version: Annotated[int, Meta(ge=1, le=1)] = 1
    identity: Annotated[str, Meta(max_length=200)] = ""  # of model and machine: times hold for no other
    rows: Annotated[tuple[SplitRow, ...], Meta(max_length=_MOST_ROWS)]


# ---- cutting


def shape_of(slices: Iterable[Slice]) -> SplitShape:
    """What a forward of these slices computes."""
    prefill_tokens = prefill_context = decodes = decode_context = 0
    for piece in slices:
        if piece.length == 1:
            decodes += 1
            decode_context += piece.start
        else:
            prefill_tokens += piece.length
            prefill_context += piece.start
    return SplitShape(prefill_tokens, prefill_context, decodes, decode_context)


def cut(slices: tuple[Slice, ...], split: Split, block_size: int) -> tuple[NanoBatch, ...]:
    """The slices as the split has them, none lost, none empty; parts of one sequence in their order.

    A long slice is cut where a block ends. There may come out fewer nano-batches than the split says, never more.
    """
    if not slices:
        return ()
    if split == WHOLE:
        return (NanoBatch(slices),)
    prompts = tuple(piece for piece in slices if piece.length > 1)
    decodes = tuple(piece for piece in slices if piece.length == 1)
    if not prompts and split.decode_parts < 2:
        return (NanoBatch(slices),)
    if not split.decode_parts and prompts:
        first, *others = _prompt_parts(prompts, split.prompt_parts, block_size)
        return (NanoBatch((*decodes, *first)), *map(NanoBatch, others))
    parts = (*_even(decodes, split.decode_parts), *_prompt_parts(prompts, split.prompt_parts, block_size))
    return tuple(map(NanoBatch, parts))


def _even(slices: tuple[Slice, ...], parts: int) -> Iterator[tuple[Slice, ...]]:
    size = -(-len(slices) // max(parts, 1))
    for at in range(0, len(slices), max(size, 1)):
        yield slices[at : at + size]


def _prompt_parts(slices: tuple[Slice, ...], parts: int, block_size: int) -> list[tuple[Slice, ...]]:
    """About as many tokens in each; the last takes what the ends of blocks left over."""
    left_tokens = sum(piece.length for piece in slices)
    made: list[tuple[Slice, ...]] = []
    part: list[Slice] = []
    room = -(-left_tokens // parts)
    for piece in slices:
        start, left = piece.start, piece.length
        while left:
            is_last = len(made) + 1 >= parts
            length = left if is_last else chunk_length(start, left, room, block_size)
            is_end = length == left
            part.append(Slice(piece.seq, start, length, is_end and piece.samples))
            start, left, room, left_tokens = start + length, left - length, room - length, left_tokens - length
            if left_tokens and not is_last and (not is_end or room < block_size):
                made.append(tuple(part))
                part.clear()
                room = -(-left_tokens // (parts - len(made)))
    return [*made, tuple(part)] if part else made


def capped(batches: tuple[NanoBatch, ...], most_tokens: int, block_size: int) -> tuple[NanoBatch, ...]:
    """The same slices in the same order, in nano-batches of at most so many tokens each."""
    made: list[NanoBatch] = []
    for batch in batches:
        part: list[Slice] = []
        room = most_tokens
        for piece in batch.slices:
            start, left = piece.start, piece.length
            while left:
                if not room:
                    made.append(NanoBatch(tuple(part)))
                    part, room = [], most_tokens
                length = chunk_length(start, left, room, block_size)
                is_end = length == left
                part.append(Slice(piece.seq, start, length, is_end and piece.samples))
                start, left = start + length, left - length
                room = room - length if is_end else 0
        made.append(NanoBatch(tuple(part)))
    return tuple(made)


def candidate_splits(shape: SplitShape) -> list[Split]:
    """Every cut that is tried on a shape, the whole step first."""
    prompt_parts = (1, 2, 3, 4, 8) if shape.prefill_tokens else (1,)
    decode_parts = () if not shape.decodes else (1, 2) if shape.prefill_tokens else (2, 4)
    return [
        Split(prompts, decodes)
        for prompts, decodes in product(prompt_parts, (0, *decode_parts))
        if decodes <= shape.decodes and (prompts == 1 or prompts * _LEAST_PART <= shape.prefill_tokens)
    ]


# ---- choosing


class Splitter:
    """Decides how a step is cut, by a table of measured ratios; between measured shapes by those of the nearest ones.

    A step stays whole unless a cut was measured to save 3 %. Without a table every step is whole. A cut lets nobody in
    sooner, as a step commits as a whole: how long a step may be is the planner's to say.
    """

    def __init__(self, table: SplitTable | None = None) -> None:
        self._lookup = None if table is None else _Lookup(table)

    def split(self, slices: tuple[Slice, ...], block_size: int) -> tuple[NanoBatch, ...]:
        """Return the nano-batches of a step."""
        return cut(slices, self.choose(slices), block_size)

    def choose(self, slices: tuple[Slice, ...]) -> Split:
        """Return how the step is to be cut."""
        if self._lookup is None or sum(piece.length for piece in slices) < _LEAST_TOKENS:
            return WHOLE
        best = min(
            self._lookup.cuts(shape_of(slices)), key=lambda timed: timed.ratio, default=MeasuredSplit(WHOLE, 1.0)
        )
        return best.split if best.ratio <= _GAIN else WHOLE


class _Lookup:
    """The rows of a table by where they lie."""

    def __init__(self, table: SplitTable) -> None:
        self._ratios_by_shape = {
            (row.prefill_tokens, row.decodes, row.context_tokens): {timed.split: timed.ratio for timed in row.cuts}
            for row in table.rows
        }
        self._axes = tuple(sorted(set(values)) for values in zip(*self._ratios_by_shape, strict=True))

    def cuts(self, shape: SplitShape) -> list[MeasuredSplit]:
        """Cuts that were measured at every neighbour of the shape, each with its ratio there or between them."""
        if not self._axes:
            return []
        point = (shape.prefill_tokens, shape.decodes, shape.prefill_context + shape.decode_context)
        near: list[tuple[dict[Split, float], float]] = []
        for corner in product(*map(_neighbours, self._axes, point)):
            (prefill, in_prefill), (decodes, in_decodes), (context, in_context) = corner
            # Beside a step of prompts alone, one of decodes says nothing, and the other way round.
            is_alike = bool(prefill) == bool(shape.prefill_tokens) and bool(decodes) == bool(shape.decodes)
            ratios = self._ratios_by_shape.get((prefill, decodes, context))
            if is_alike and ratios is not None:
                near.append((ratios, in_prefill * in_decodes * in_context))
        if not near:
            return []
        total = sum(weight for _, weight in near)
        known = [split for split in near[0][0] if all(split in ratios for ratios, _ in near)]
        return [MeasuredSplit(split, sum(ratios[split] * weight for ratios, weight in near) / total) for split in known]


def _neighbours(axis: list[int], value: int) -> tuple[tuple[int, float], ...]:
    """The point itself, or the two round it with their weights; an end for what is near it; nothing far out."""
    if value > axis[-1]:
        return ((axis[-1], 1.0),) if value <= _REACH * axis[-1] else ()
    above = bisect_left(axis, value)
    if axis[above] == value or not above:
        return ((axis[above], 1.0),) if value * _REACH >= axis[above] else ()
    low, high = axis[above - 1], axis[above]
    part = log2((1 + value) / (1 + low)) / log2((1 + high) / (1 + low))
    return ((low, 1 - part), (high, part))
