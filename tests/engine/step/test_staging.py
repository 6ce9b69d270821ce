"""Staging: no buffer is overwritten before it was read."""

import random
from collections import deque

import numpy as np
import pytest
import torch
from torch import Tensor

from tiercel.device.cpu import InlineLane
from tiercel.engine.step.staging import HostRing, Staging, open_staging, packed_bytes

CPU = torch.device("cpu")
ARRAYS = (
    np.arange(7, dtype=np.int64),
    np.zeros(0, np.int64),
    np.array([[3, 4], [5, 6], [7, 8]], np.int64)[:, ::-1],
    np.array([9, 10, 11], np.int32),
    np.array([True, False, True]),
)


class Copy:
    """A copy that a slow device has not made yet, and its mark."""

    def __init__(self, memory: Tensor, content: int, size: int) -> None:
        self.memory = memory
        self.content = content
        self.size = size
        self.is_done = False

    def is_past(self) -> bool:
        return self.is_done

    def wait(self) -> None:
        raise AssertionError("nobody waits for a buffer")

    def run(self) -> None:
        assert bool((self.memory[: self.size] == self.content).all()), "written over before it was copied"
        self.is_done = True


def same(tensors: tuple[Tensor, ...]) -> bool:
    return all(
        tensor.shape == array.shape and np.array_equal(tensor.numpy(), array) and str(array.dtype) in str(tensor.dtype)
        for tensor, array in zip(tensors, ARRAYS, strict=True)
    )


@pytest.mark.parametrize("seed", range(20))
def test_no_buffer_is_filled_while_a_copy_still_reads_it(seed: int) -> None:
    rng = random.Random(seed)
    ring, queue, most = HostRing(is_pinned=False), deque[Copy](), 0
    for turn in range(200):
        if rng.random() < 0.6:
            size = rng.choice([1, 100, 1 << 16, (1 << 16) + 1])
            memory = ring.take(size)
            assert len(memory) >= size
            memory[:size] = turn % 251
            queue.append(Copy(memory, turn % 251, size))
            ring.give(memory, queue[-1])
            most = max(most, len(queue))
        elif queue:
            queue.popleft().run()
    assert len(ring) <= most + 1


def test_the_ring_has_as_many_buffers_as_copies_are_in_flight() -> None:
    ring = HostRing(is_pinned=False)
    seen: set[int] = set()
    waiting: deque[Copy] = deque()
    for _ in range(50):
        memory = ring.take(1000)
        seen.add(memory.data_ptr())
        waiting.append(Copy(memory, 0, 0))
        ring.give(memory, waiting[-1])
        if len(waiting) == 3:
            waiting.popleft().run()
    assert len(seen) == len(ring) == 3


def test_a_buffer_that_is_too_small_is_replaced() -> None:
    ring = HostRing(is_pinned=False)
    for size in (10, 1 << 17, 1 << 18, 10):
        memory = ring.take(size)
        copy = Copy(memory, 0, 0)
        copy.run()
        ring.give(memory, copy)
    assert len(ring) == 1
    assert len(memory) == 1 << 18


@pytest.mark.parametrize("packs", [True, False])
def test_arrays_arrive_with_their_types_and_shapes(packs: bool) -> None:
    staging = Staging(CPU, InlineLane(), HostRing(is_pinned=False)) if packs else open_staging(CPU, InlineLane())
    with torch.inference_mode():
        assert same(staging.upload_no_sync([np.ascontiguousarray(array) for array in ARRAYS]))
        target = torch.full((packed_bytes(ARRAYS) + 64,), 77, dtype=torch.uint8)
        tensors = staging.upload_no_sync(ARRAYS, target)
    assert same(tensors)
    assert {tensor.untyped_storage().data_ptr() for tensor in tensors} == {target.data_ptr()}
    assert [(tensor.data_ptr() - target.data_ptr()) % 64 for tensor in tensors] == [0] * len(ARRAYS)
    assert bool((target[-64:] == 77).all())


def test_on_the_cpu_nothing_is_copied() -> None:
    tokens = np.arange(5, dtype=np.int64)
    (tensor,) = open_staging(CPU, InlineLane()).upload_no_sync([tokens])
    tokens[2] = 40
    assert tensor.tolist() == [0, 1, 40, 3, 4]


def test_the_next_arrays_do_not_change_those_before() -> None:
    staging = Staging(CPU, InlineLane(), HostRing(is_pinned=False))
    (first,) = staging.upload_no_sync([np.array([1, 2, 3])])
    (second,) = staging.upload_no_sync([np.array([4, 5])])
    assert (first.tolist(), second.tolist()) == ([1, 2, 3], [4, 5])
