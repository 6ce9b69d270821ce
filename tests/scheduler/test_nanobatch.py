"""Splitting a step into nano-batches, and the choice of a split by measured times."""

import random

import pytest

from tiercel.scheduler.nanobatch import (
    WHOLE,
    MeasuredSplit,
    Split,
    SplitRow,
    SplitTable,
    Splitter,
    candidate_splits,
    capped,
    cut,
    shape_of,
)
from tiercel.values.ids import SeqId
from tiercel.values.plan import NanoBatch, Slice, whole_slices

BLOCK = 16


def random_slices(rng: random.Random) -> tuple[Slice, ...]:
    slices = []
    for seq in range(rng.randrange(1, 40)):
        length = 1 if rng.random() < 0.6 else rng.randrange(2, 600)
        slices.append(Slice(SeqId(seq), rng.randrange(3000), length, rng.random() < 0.7))
    return tuple(slices)


def prompt(tokens: int, start: int = 0, seq: int = 1) -> Slice:
    return Slice(SeqId(seq), start, tokens, True)


def lengths(batches: tuple[NanoBatch, ...]) -> list[list[int]]:
    return [[piece.length for piece in batch.slices] for batch in batches]


def rows(*ratios: tuple[int, float]) -> SplitTable:
    """Return a table of prompts with the given tokens and ratio of a split in halves."""
    return SplitTable(
        rows=tuple(
            SplitRow(tokens, 0, 0, (MeasuredSplit(Split(2, 0), ratio), MeasuredSplit(Split(4, 0), 1.3)))
            for tokens, ratio in ratios
        )
    )


@pytest.mark.parametrize("seed", range(100))
def test_a_split_loses_no_slice_and_keeps_the_order_of_samples(seed: int) -> None:
    rng = random.Random(seed)
    slices = random_slices(rng)
    for split in candidate_splits(shape_of(slices)):
        batches = cut(slices, split, BLOCK)
        assert all(batch.slices and all(piece.length >= 1 for piece in batch.slices) for batch in batches)
        assert len(batches) <= max(split.prompt_parts, 1) + split.decode_parts
        assert {piece.seq: piece for piece in whole_slices(batches)} == {piece.seq: piece for piece in slices}
        sampling = [piece.seq for batch in batches for piece in batch.slices if piece.samples]
        assert sampling == [piece.seq for piece in whole_slices(batches) if piece.samples]
        for batch in batches:
            seqs = [piece.seq for piece in batch.slices]
            assert len(seqs) == len(set(seqs))


@pytest.mark.parametrize("seed", range(50))
def test_a_cap_holds_for_every_nano_batch_and_loses_no_slice(seed: int) -> None:
    rng = random.Random(seed)
    slices = random_slices(rng)
    before = cut(slices, rng.choice(candidate_splits(shape_of(slices))), BLOCK)
    most = rng.choice([1, 5, 16, 100, 10**6])
    batches = capped(before, most, BLOCK)
    assert all(1 <= sum(piece.length for piece in batch.slices) <= most for batch in batches)
    assert whole_slices(batches) == whole_slices(before)
    for batch in batches:
        assert len({piece.seq for piece in batch.slices}) == len(batch.slices)
    if most == 10**6:
        assert batches == before


def test_parts_of_a_capped_prompt_end_on_block_boundaries() -> None:
    decode = Slice(SeqId(2), 7, 1, True)
    batches = capped((NanoBatch((decode, prompt(100, start=5))),), 40, BLOCK)
    assert lengths(batches) == [[1, 27], [32], [32], [9]]


def test_prompts_are_split_on_block_boundaries() -> None:
    assert lengths(cut((prompt(100, start=5),), Split(2, 0), BLOCK)) == [[43], [57]]
    assert lengths(cut((prompt(100), prompt(100, seq=2)), Split(2, 0), BLOCK)) == [[100], [100]]
    assert lengths(cut((prompt(10),), Split(4, 0), BLOCK)) == [[3], [3], [2], [2]]


def test_decodes_are_first_alone_or_with_the_first_prompts() -> None:
    slices = (*(prompt(1, 50, seq) for seq in range(2, 6)), prompt(64))
    assert lengths(cut(slices, WHOLE, BLOCK)) == [[1, 1, 1, 1, 64]]
    assert lengths(cut(slices, Split(2, 0), BLOCK)) == [[1, 1, 1, 1, 32], [32]]
    assert lengths(cut(slices, Split(2, 2), BLOCK)) == [[1, 1], [1, 1], [32], [32]]


def test_without_a_table_every_step_is_whole() -> None:
    assert lengths(Splitter().split((prompt(2048),), BLOCK)) == [[2048]]


def test_a_step_is_split_only_where_a_gain_was_measured() -> None:
    gains = Splitter(rows((256, 0.9), (1024, 0.99)))
    assert lengths(gains.split((prompt(256),), BLOCK)) == [[128], [128]]
    assert lengths(gains.split((prompt(1024),), BLOCK)) == [[1024]]  # 1 % is too little
    assert lengths(gains.split((prompt(512),), BLOCK)) == [[256], [256]]  # interpolated: 5.5 %
    assert lengths(gains.split((prompt(900),), BLOCK)) == [[900]]
    assert lengths(gains.split((prompt(100),), BLOCK)) == [[100]]
    assert lengths(gains.split((prompt(4096),), BLOCK)) == [[4096]]  # too far beyond the table
    loses = Splitter(rows((256, 1.1), (1024, 1.05)))
    assert lengths(loses.split((prompt(512),), BLOCK)) == [[512]]
    assert lengths(Splitter(SplitTable(rows=())).split((prompt(512),), BLOCK)) == [[512]]


def test_a_table_of_prompts_does_not_apply_to_mixed_steps() -> None:
    splitter = Splitter(rows((256, 0.5)))
    assert len(splitter.split((prompt(256), prompt(1, 9, seq=2)), BLOCK)) == 1


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_near_the_best_of_every_row(seed: int) -> None:
    rng = random.Random(seed)
    table = SplitTable(
        rows=tuple(
            SplitRow(
                tokens, 0, 0, tuple(MeasuredSplit(Split(parts, 0), rng.uniform(0.8, 1.4)) for parts in (2, 3, 4, 8))
            )
            for tokens in (64, 256, 1024)
        )
    )
    splitter = Splitter(table)
    for row in table.rows:
        ratio_by_split = {timed.split: timed.ratio for timed in row.cuts} | {WHOLE: 1.0}
        ratio = ratio_by_split[splitter.choose((prompt(row.prefill_tokens),))]
        assert ratio <= 1.0
        assert ratio <= 1.05 * min(ratio_by_split.values())
