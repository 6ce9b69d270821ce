"""Slots as an index: slices and arrays of indices have the same effect."""

import random

import numpy as np
import pytest

from tests.seeds import fresh_seeds
from tiercel.kvcache.slot_index import MIN_NUMPY_SLOTS, NO_SLOTS, SlotIndex, Slots, count_each

BOOK = 20_000
SEEDS = [*range(40), *fresh_seeds(20)]


def some_slots(rng: random.Random) -> Slots:
    """Return few or many slots in runs that count up or down, close together or apart."""
    lengths = rng.choice(([1, 2, 3], [1, 300, 2000], [5000], [40, 300]))
    slots: list[int] = []
    first = rng.choice((0, 1, 7))
    runs: list[list[int]] = []
    while first < BOOK // 2 and len(runs) < 60:
        length = rng.choice(lengths)
        run = list(range(first, min(first + length, BOOK)))
        runs.append(run[:: rng.choice((1, -1))])
        first += length + rng.choice((0, 1, 50))
    if rng.random() < 0.5:
        rng.shuffle(runs)
    for run in runs:
        slots += run
    return np.array(slots[: rng.choice((0, 1, MIN_NUMPY_SLOTS, BOOK, BOOK, BOOK))], np.intp)


@pytest.mark.parametrize("seed", SEEDS)
def test_slices_read_and_write_the_same_as_an_array_of_indices(seed: int) -> None:
    rng = random.Random(seed)
    slots = some_slots(rng)
    index, book = SlotIndex(slots), np.random.default_rng(seed).integers(0, 90, BOOK)
    read = index.read(book)
    assert read.tolist() == book[slots].tolist()
    assert index.items_of(book.tolist()) == book[slots].tolist()
    sliced, indexed = book.copy(), book.copy()
    for values in (np.arange(len(slots)), 7):
        index.write(sliced, values)
        indexed[slots] = values
        assert (sliced == indexed).all()
    index.add(sliced, -3)
    indexed[slots] -= 3
    assert (sliced == indexed).all()
    is_chosen = read < rng.choice((0, 45, 90))
    assert index.filter(is_chosen).slots.tolist() == slots[is_chosen].tolist()
    count = rng.choice((0, 1, 5, len(slots) // 2, len(slots), len(slots) + 1))
    assert index.head(count).read(book).tolist() == book[slots[:count]].tolist()
    assert index.backwards().read(book).tolist() == book[slots[::-1]].tolist()
    places = np.flatnonzero(read < 45) if rng.random() < 0.5 else np.arange(min(count, len(slots)))
    assert index.pick(places).read(book).tolist() == book[slots[places]].tolist()
    index.write(book, 1)
    assert read.max(initial=0) < 90 and (not len(read) or read.base is None), "what was read is a copy"


def test_a_repeated_slot_is_read_each_time() -> None:
    null_blocks = np.zeros(5000, np.intp)
    assert SlotIndex(null_blocks).read(np.arange(5, 9)).tolist() == [5] * 5000


def test_a_run_down_to_slot_0_ends_there() -> None:
    assert SlotIndex(np.arange(4999, -1, -1)).read(np.arange(6000)).tolist() == list(range(4999, -1, -1))


@pytest.mark.parametrize("numbers", [[], [3], [3, 3, 3], [0, 2, 2, 0, 5]])
def test_numbers_are_counted(numbers: list[int]) -> None:
    counted = [(number, numbers.count(number)) for number in sorted(set(numbers))]
    assert count_each(np.array(numbers, np.intp) if numbers else NO_SLOTS) == counted
