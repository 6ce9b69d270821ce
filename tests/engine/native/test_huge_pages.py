"""Memory of packed weights: apart from each other, aligned."""

import gc
import mmap

import pytest

from tiercel.engine.native.huge_pages import WeightMemory


@pytest.mark.parametrize("sizes", [(1, 1, 63, 64, 65), (40 << 20, 40 << 20), (30 << 20, 30 << 20, 30 << 20, 5)])
def test_weights_are_apart(sizes: tuple[int, ...]) -> None:
    memory = WeightMemory()
    taken = [memory.take(size) for size in sizes]
    assert [one.numel() for one in taken] == list(sizes)
    for index, one in enumerate(taken):
        assert one.data_ptr() % 64 == 0
        one[0] = one[-1] = index + 1
    assert [(int(one[0]), int(one[-1])) for one in taken] == [(index + 1, index + 1) for index in range(len(sizes))]


def test_large_weights_start_a_huge_page() -> None:
    assert WeightMemory().take(40 << 20).data_ptr() % (2 << 20) == 0


def test_a_weight_outlives_the_memory_it_was_taken_from() -> None:
    one = WeightMemory().take(mmap.PAGESIZE)
    gc.collect()
    one[:] = 7
    assert int(one.long().sum()) == 7 * mmap.PAGESIZE
