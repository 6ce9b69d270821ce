"""Staging: no buffer is overwritten before it was read, and arrays arrive by copies and by kernels."""

import random
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.simulated_gpu import PLACE, simulated_gpu
from tiercel.device.cpu import InlineLane
from tiercel.engine.step.staging import (
    Carrier,
    CopyCarrier,
    HostRing,
    KernelCarrier,
    ResultMemory,
    Staging,
    open_staging,
    packed_bytes,
)
from tiercel.engine.step.tables import DeviceTables

CPU = torch.device("cpu")
in_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
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


@pytest.fixture(params=[CopyCarrier, pytest.param(KernelCarrier, marks=in_interpreter)])
def staging(request: pytest.FixtureRequest) -> Staging:
    """A staging that moves everything, by copies or by kernels."""
    return Staging(CPU, InlineLane(), HostRing(is_pinned=False), request.param())


@pytest.mark.parametrize("packs", [True, False])
def test_arrays_arrive_with_their_types_and_shapes(packs: bool, staging: Staging) -> None:
    staging = staging if packs else open_staging(CPU, InlineLane())
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


def test_the_next_arrays_do_not_change_those_before(staging: Staging) -> None:
    (first,) = staging.upload_no_sync([np.array([1, 2, 3])])
    (second,) = staging.upload_no_sync([np.array([4, 5])])
    assert (first.tolist(), second.tolist()) == ([1, 2, 3], [4, 5])


# ---- tables and results


@pytest.mark.parametrize("seed", range(5))
def test_changes_of_tables_arrive_with_random_ragged_arrays(seed: int, staging: Staging) -> None:
    rng = np.random.default_rng(seed)
    tables, wanted = DeviceTables.open(7, 30, CPU), np.zeros(7 * 30, np.int64)
    for _ in range(15):
        places = rng.permutation(7 * 30)[: rng.integers(0, 40)]
        slots = rng.integers(1, 1 << 40, len(places))
        tables.note(np.stack((places, slots), axis=1))
        wanted[places] = slots
        arrays = [
            rng.integers(-(1 << 60), 1 << 60, rng.integers(0, 300)),
            rng.integers(0, 1 << 30, (rng.integers(0, 9), 5), dtype=np.int32),
            rng.random(rng.integers(0, 70)) < 0.5,
            rng.random((3, rng.integers(0, 9)), dtype=np.float32),
        ]
        for found, array in zip(staging.upload_no_sync(arrays, tables=tables), arrays, strict=True):
            assert np.array_equal(found.numpy(), array)
        assert np.array_equal(tables.tables.numpy().reshape(-1), wanted)
        assert not len(tables.unsent())


def test_changes_of_tables_are_kept_if_nothing_could_be_queued(staging: Staging) -> None:
    class Refusing(CopyCarrier):
        def take_inputs_no_sync(self, *given: object) -> None:
            raise RuntimeError("out of memory")

    tables = DeviceTables.open(2, 4, CPU)
    tables.note(np.array([[5, 7]]))
    with pytest.raises(RuntimeError):
        Staging(CPU, InlineLane(), HostRing(is_pinned=False), Refusing()).upload_no_sync(ARRAYS, tables=tables)
    staging.upload_no_sync(ARRAYS, tables=tables)
    assert tables.tables[1, 1] == 7


def test_results_arrive_on_the_host(staging: Staging) -> None:
    tokens, bad_rows, rows = torch.tensor([5, 6, 7]), torch.tensor([False, True, False]), torch.tensor([3, 0, 1])
    last_tokens = torch.zeros(4, dtype=torch.int64)
    found = staging.report_no_sync(tokens, bad_rows, rows, last_tokens)
    assert [values.tolist() for values in found] == [[5, 6, 7], [False, True, False]]
    assert last_tokens.tolist() == [6, 7, 0, 5]
    wide = torch.arange(12.0).view(3, 4)
    assert torch.equal(staging.fetch_no_sync(wide[:, 1:3]), wide[:, 1:3])
    assert torch.equal(staging.send_no_sync(wide.numpy()[:, ::2]), wide[:, ::2])


def test_memory_of_results_lives_until_the_device_has_written_it() -> None:
    memory, like = ResultMemory(is_pinned=False), torch.zeros(3)
    first = Copy(memory.take(like), 0, 0)
    assert len(memory) == 1  # although nobody reads it
    memory.mark(first)
    second = Copy(memory.take(like), 0, 0)
    memory.mark(second)
    assert len(memory) == 2
    first.run()
    memory.mark(second)
    assert len(memory) == 1


# ---- the choice


@in_interpreter
@pytest.mark.parametrize("maps", [True, False])
def test_kernels_are_used_if_the_device_addresses_host_memory(maps: bool) -> None:
    with simulated_gpu() as gpu:
        staging = open_staging(PLACE, InlineLane(), maps_host_memory=maps)
        gpu.operations.clear()
        staging.fetch_no_sync(staging.upload_no_sync(ARRAYS)[0])
    assert [type(operation).__name__ for operation in gpu.operations] == ["Launch" if maps else "EngineCopy"] * 2


class Wrong(KernelCarrier):
    """Moves something else."""

    def move_no_sync(self, source: Tensor, target: Tensor) -> None:
        target.zero_()


class Failing(KernelCarrier):
    """Launches are refused, as Triton refuses addresses that the device does not know."""

    def move_no_sync(self, source: Tensor, target: Tensor) -> None:
        raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")


@in_interpreter
@pytest.mark.parametrize("carrier", [Wrong, Failing])
def test_kernels_that_fail_their_trial_are_replaced_by_copies(
    carrier: Callable[[], Carrier], caplog: pytest.LogCaptureFixture
) -> None:
    with simulated_gpu() as gpu:
        staging = open_staging(PLACE, InlineLane(), maps_host_memory=True, open_carrier=carrier)
        gpu.operations.clear()
        staging.upload_no_sync(ARRAYS)
    assert [type(operation).__name__ for operation in gpu.operations] == ["EngineCopy"]
    assert "steps use copies, which wait for swaps" in caplog.text
