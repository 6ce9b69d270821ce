"""Nano-batches: splits a step into forwards if that saves time.

A nano-batch is one forward. On one lane every forward reads all weights again, so a step is one nano-batch, unless
`tiercel calibrate` measured that a split is faster on this machine, or device memory is short.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import product
from math import log2
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from tiercel.scheduler.chunk import chunk_length
from tiercel.values.plan import NanoBatch, Slice

_MAX_PARTS = 16
_MAX_ROWS = 4096
_MIN_STEP_TOKENS = 64  # smaller steps are never split
_MIN_PART_TOKENS = 16  # of the prompts, in one part
_MAX_RATIO = 0.97  # of the time of a split step to that of the whole step
_REACH = 2.0  # the table applies to shapes up to this factor beyond its ends


class SplitShape(NamedTuple):
    """The size of a forward. Context is the KV tokens before the slices, of prompts and of decodes."""

    prefill_tokens: int
    prefill_context: int
    decodes: int
    decode_context: int


class Split(Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """A way to split a step."""

    prompt_parts: Annotated[int, Meta(ge=1, le=_MAX_PARTS)] = 1  # nano-batches of equal prompt tokens
    decode_parts: Annotated[int, Meta(ge=0, le=_MAX_PARTS)] = (
        0  # nano-batches of decodes only; 0: decodes join the first prompts
    )


WHOLE = Split()


class MeasuredSplit(Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """The measured time of a split, relative to the whole step."""

    split: Split
    ratio: Annotated[float, Meta(gt=0, le=1e3)]


_Count = Annotated[int, Meta(ge=0, le=1 << 40)]


class SplitRow(Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """One measured shape and its splits, without the whole step, whose ratio is 1."""

    prefill_tokens: _Count
    decodes: _Count
    context_tokens: _Count
    cuts: Annotated[tuple[MeasuredSplit, ...], Meta(max_length=_MAX_PARTS * _MAX_PARTS)]


class SplitTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of the search for splits: all measured rows."""

    version: Annotated[int, Meta(ge=1, le=1)] = 1
    identity: Annotated[str, Meta(max_length=200)] = (
        ""  # of the model and the machine that the times were measured with
    )
    rows: Annotated[tuple[SplitRow, ...], Meta(max_length=_MAX_ROWS)]


# ---- splitting


def shape_of(slices: Iterable[Slice]) -> SplitShape:
    """Return the shape of a forward of these slices."""
    prefill_tokens = prefill_context = decodes = decode_context = 0
    for piece in slices:
        if piece.is_decode:
            decodes += 1
            decode_context += piece.start
        else:
            prefill_tokens += piece.length
            prefill_context += piece.start
    return SplitShape(prefill_tokens, prefill_context, decodes, decode_context)


def cut(slices: tuple[Slice, ...], split: Split, block_size: int) -> tuple[NanoBatch, ...]:
    """Split slices into nano-batches. Parts of one sequence keep their order.

    A long slice is cut at the end of a block. The result may have fewer nano-batches than the split, never more.
    """
    if not slices:
        return ()
    if split == WHOLE:
        return (NanoBatch(slices),)
    prompts = tuple(piece for piece in slices if not piece.is_decode)
    decodes = tuple(piece for piece in slices if piece.is_decode)
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
    """Divide the tokens about evenly, with cuts at block ends; the last part takes the rest."""
    left_tokens = sum(piece.length for piece in slices)
    made: list[tuple[Slice, ...]] = []
    part: list[Slice] = []
    part_tokens = -(-left_tokens // parts)
    for piece in slices:
        start, left = piece.start, piece.length
        while left:
            is_last = len(made) + 1 >= parts
            length = left if is_last else chunk_length(start, left, part_tokens, block_size)
            is_end = length == left
            part.append(Slice(piece.seq, start, length, is_end and piece.samples))
            start, left = start + length, left - length
            part_tokens, left_tokens = part_tokens - length, left_tokens - length
            if left_tokens and not is_last and (not is_end or part_tokens < block_size):
                made.append(tuple(part))
                part.clear()
                part_tokens = -(-left_tokens // (parts - len(made)))
    return [*made, tuple(part)] if part else made


def capped(batches: tuple[NanoBatch, ...], max_tokens: int, block_size: int) -> tuple[NanoBatch, ...]:
    """Return the same slices in the same order, in nano-batches of at most `max_tokens` tokens.

    No slice may have proposed tokens.
    """
    made: list[NanoBatch] = []
    for batch in batches:
        part: list[Slice] = []
        left_tokens = max_tokens
        for piece in batch.slices:
            start, left = piece.start, piece.length
            while left:
                if not left_tokens:
                    made.append(NanoBatch(tuple(part)))
                    part, left_tokens = [], max_tokens
                length = chunk_length(start, left, left_tokens, block_size)
                is_end = length == left
                part.append(Slice(piece.seq, start, length, is_end and piece.samples))
                start, left = start + length, left - length
                left_tokens = left_tokens - length if is_end else 0
        made.append(NanoBatch(tuple(part)))
    return tuple(made)


def candidate_splits(shape: SplitShape) -> list[Split]:
    """Return the splits that are measured for a shape, the whole step first."""
    prompt_parts = (1, 2, 3, 4, 8) if shape.prefill_tokens else (1,)
    decode_parts = () if not shape.decodes else (1, 2) if shape.prefill_tokens else (2, 4)
    return [
        Split(prompts, decodes)
        for prompts, decodes in product(prompt_parts, (0, *decode_parts))
        if decodes <= shape.decodes and (prompts == 1 or prompts * _MIN_PART_TOKENS <= shape.prefill_tokens)
    ]


# ---- choosing


class Splitter:
    """Chooses how a step is split, by a table of measured ratios that is interpolated between shapes.

    A step stays whole unless the table says that a split saves 3 % of its time. Without a table every step is whole.
    The length of a step is decided by the planner: a step commits as a whole, so a split does not end it sooner.
    """

    def __init__(self, table: SplitTable | None = None) -> None:
        self._lookup = None if table is None else _Lookup(table)

    def split(self, slices: tuple[Slice, ...], block_size: int) -> tuple[NanoBatch, ...]:
        """Return the nano-batches of a step."""
        return cut(slices, self.choose(slices), block_size)

    def choose(self, slices: tuple[Slice, ...]) -> Split:
        """Return the split of a step."""
        if self._lookup is None or sum(piece.length for piece in slices) < _MIN_STEP_TOKENS:
            return WHOLE
        best = min(
            self._lookup.splits(shape_of(slices)), key=lambda timed: timed.ratio, default=MeasuredSplit(WHOLE, 1.0)
        )
        return best.split if best.ratio <= _MAX_RATIO else WHOLE


class _Lookup:
    """The rows of a table, indexed by shape."""

    def __init__(self, table: SplitTable) -> None:
        self._ratios_by_shape = {
            (row.prefill_tokens, row.decodes, row.context_tokens): {timed.split: timed.ratio for timed in row.cuts}
            for row in table.rows
        }
        self._axes = tuple(sorted(set(values)) for values in zip(*self._ratios_by_shape, strict=True))

    def splits(self, shape: SplitShape) -> list[MeasuredSplit]:
        """Return the splits that were measured at every neighbour of the shape, with their interpolated ratios."""
        if not self._axes:
            return []
        point = (shape.prefill_tokens, shape.decodes, shape.prefill_context + shape.decode_context)
        near: list[tuple[dict[Split, float], float]] = []
        for corner in product(*map(_neighbours, self._axes, point)):
            (prefill, in_prefill), (decodes, in_decodes), (context, in_context) = corner
            # A step of prompts only says nothing about a step of decodes only, and vice versa.
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
    """Return the points of an axis next to a value, with their weights; none if the value is far beyond the axis."""
    if value > axis[-1]:
        return ((axis[-1], 1.0),) if value <= _REACH * axis[-1] else ()
    above = bisect_left(axis, value)
    if axis[above] == value or not above:
        return ((axis[above], 1.0),) if value * _REACH >= axis[above] else ()
    low, high = axis[above - 1], axis[above]
    part = log2((1 + value) / (1 + low)) / log2((1 + high) / (1 + low))
    return ((low, 1 - part), (high, part))
