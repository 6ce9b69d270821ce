"""Copies to and from a GPU, byte by byte, on a fake of libcuda."""

import ctypes
import mmap
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any  # of ctypes' pointers

import numpy as np
import pytest
import torch

from tests.device.fake_cuda import ILLEGAL_ADDRESS, NOT_SUPPORTED, FakeLibrary
from tests.kvcache.store.builders import MoverBench, slots
from tiercel.device.cpu import InlineLane
from tiercel.device.cuda import CudaDevice, open_stream
from tiercel.device.cuda_copy import CudaCopyLane
from tiercel.device.cuda_driver import CopyAttributes, CudaDriver, SourceOrder
from tiercel.device.extents import Extents
from tiercel.device.pinned import PinnedMemory
from tiercel.values.errors import DeviceError
from tiercel.values.tier import Route, Verdict

BLOCK = 2 * mmap.PAGESIZE
BLOCKS = 40
SLAB = 8 * BLOCK


def address_of(raw: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(raw))


@dataclass
class Bench:
    """A fake GPU of host memory, and a host tier in a memfd."""

    library: FakeLibrary
    above: mmap.mmap
    below: mmap.mmap
    device: CudaDevice
    lane: CudaCopyLane

    @property
    def starts(self) -> tuple[int, int]:
        return address_of(self.above), address_of(self.below)

    def pin(self) -> PinnedMemory:
        pinned = self.device.pin(self.starts[1], BLOCKS * BLOCK, BLOCK)
        pinned.wait()
        return pinned

    def extents(self, runs: list[tuple[int, int, int]], *, up: bool) -> Extents:
        source, target = self.starts[::-1] if up else self.starts
        return Extents.of_runs(runs, source, target, BLOCK)


def open_bench(library: FakeLibrary) -> Bench:
    fd = os.memfd_create("host")
    os.ftruncate(fd, BLOCKS * BLOCK)
    above, below = mmap.mmap(-1, BLOCKS * BLOCK), mmap.mmap(fd, BLOCKS * BLOCK)
    os.close(fd)
    draw = random.Random(0)
    above[:], below[:] = draw.randbytes(len(above)), draw.randbytes(len(below))
    device = library.open_device(SLAB)
    return Bench(library, above, below, device, device.open_copy_lane())


@pytest.fixture
def bench() -> Iterator[Bench]:
    yield open_bench(FakeLibrary())


def draw_runs(draw: random.Random) -> list[tuple[int, int, int]]:
    """Return runs with distinct targets that cross no slab on either side."""
    targets = list(range(BLOCKS // 4))
    draw.shuffle(targets)
    runs = []
    for target in targets[: draw.randint(1, len(targets))]:
        blocks = draw.randint(1, 4)
        runs.append((4 * draw.randrange(BLOCKS // 4), 4 * target, blocks))
    return runs


@pytest.mark.parametrize("version", [12, 13, 0])
@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize("up", [False, True])
def test_the_bytes_arrive_and_nothing_else_changes(version: int, is_pinned: bool, up: bool) -> None:
    bench = open_bench(FakeLibrary(version))
    if is_pinned:
        bench.pin()
    draw = random.Random(version)
    for _ in range(20):
        runs = draw_runs(draw)
        source, target = (bench.below, bench.above) if up else (bench.above, bench.below)
        expected, before = bytearray(target), bytes(source)
        for first, to, blocks in runs:
            expected[to * BLOCK : (to + blocks) * BLOCK] = before[first * BLOCK : (first + blocks) * BLOCK]
        pending = bench.lane.copy(bench.extents(runs, up=up))
        pending.result()
        assert bytes(target) == expected
        assert bytes(source) == before
    has_batched = is_pinned and version > 0
    assert bool(bench.library.batches) == has_batched == (not bench.library.singles)
    assert {order for order, _ in bench.library.batches} == ({3 if up else 1} if has_batched else set())


def test_the_copy_of_the_cpu_moves_the_same_bytes(bench: Bench) -> None:
    runs = [(0, 5, 3), (9, 1, 1), (20, 20, 7)]
    bench.lane.copy(bench.extents(runs, up=False)).result()
    by_gpu = bytes(bench.below)
    bench.below[:] = bytes(len(bench.below))
    InlineLane().copy(bench.extents(runs, up=False)).result()
    for _, to, blocks in runs:
        part = slice(to * BLOCK, (to + blocks) * BLOCK)
        assert by_gpu[part] == bench.below[part]


def test_a_copy_is_queued_and_its_result_waits_for_it(bench: Bench) -> None:
    bench.pin()
    before = bytes(bench.above[:BLOCK])
    first = bench.lane.copy(bench.extents([(0, 3, 1)], up=True))
    second = bench.lane.copy(bench.extents([(0, 4, 1)], up=True))
    assert bench.above[3 * BLOCK : 4 * BLOCK] != bench.below[:BLOCK]
    first.result()
    assert bench.above[3 * BLOCK : 4 * BLOCK] == bench.below[:BLOCK]
    assert bench.above[4 * BLOCK : 5 * BLOCK] != bench.below[:BLOCK]
    second.result()
    assert bench.above[4 * BLOCK : 5 * BLOCK] == bench.below[:BLOCK]
    assert bench.above[:BLOCK] == before


def test_one_batch_is_one_call_and_unlocked_memory_is_copied_alone(bench: Bench) -> None:
    bench.library.refuses_after = 2  # slabs: blocks 0 to 15
    bench.pin()
    bench.lane.copy(bench.extents([(0, 0, 3), (20, 5, 3), (30, 17, 2)], up=False)).result()
    assert bench.library.batches == [(SourceOrder.STREAM, 2)]
    assert bench.library.singles == [2 * BLOCK]
    bench.lane.copy(bench.extents([], up=False)).result()
    assert len(bench.library.batches) == 1


def test_copies_use_separate_lanes_below_the_compute_lane(bench: Bench) -> None:
    bench.device.open_copy_lane()
    bench.device.open_lane()
    down, up, compute = bench.library.streams.values()
    assert down.handle != up.handle
    assert compute.priority < down.priority == up.priority


@pytest.mark.parametrize(("version", "told"), [(12, "index=2"), (13, "copies=4")])
def test_a_failing_copy_is_named_and_the_next_batch_works(version: int, told: str) -> None:
    bench = open_bench(FakeLibrary(version))
    bench.pin()
    bench.library.batch_status, bench.library.failing_index = 1, 2
    with pytest.raises(DeviceError, match=f"INVALID_VALUE.*{told}") as raised:
        bench.lane.copy(bench.extents([(at, 2 * at, 1) for at in range(4)], up=True))
    assert not bench.lane.is_lost(raised.value)
    assert ("index" in raised.value.facts) == (version == 12)
    bench.library.batch_status = 0
    bench.lane.copy(bench.extents([(1, 2, 1)], up=True)).result()
    assert bench.above[2 * BLOCK : 3 * BLOCK] == bench.below[BLOCK : 2 * BLOCK]


def test_a_batch_that_fails_as_a_whole_names_no_copy(bench: Bench) -> None:
    bench.pin()
    bench.library.batch_status = 1
    with pytest.raises(DeviceError) as raised:
        bench.lane.copy(bench.extents([(1, 2, 1)], up=True))
    assert "index" not in raised.value.facts


def test_after_a_refused_copy_none_is_in_progress(bench: Bench) -> None:
    bench.lane.copy(bench.extents([(1, 2, 1)], up=True))
    bench.library.single_status = 1
    with pytest.raises(DeviceError, match="INVALID_VALUE"):
        bench.lane.copy(bench.extents([(1, 3, 1)], up=True))
    (stream,) = bench.library.streams.values()
    assert not stream.queue


def test_after_any_exception_no_copy_is_in_progress(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("CUDA error: out of memory")

    (stream,) = bench.library.streams.values()
    monkeypatch.setattr(stream, "mark", refuse)
    with pytest.raises(RuntimeError, match="out of memory"):
        bench.lane.copy(bench.extents([(1, 2, 1)], up=True))
    assert not stream.queue
    assert bench.above[2 * BLOCK : 3 * BLOCK] == bench.below[BLOCK : 2 * BLOCK]


@pytest.mark.parametrize("is_pinned", [False, True])
def test_any_thread_may_copy_and_unlock(bench: Bench, is_pinned: bool) -> None:
    """The context is set on each thread before its first call of the driver."""
    pinned = bench.pin() if is_pinned else None
    with ThreadPoolExecutor(1) as fresh:
        fresh.submit(lambda: bench.lane.copy(bench.extents([(1, 2, 1)], up=True)).result()).result()
    assert bench.above[2 * BLOCK : 3 * BLOCK] == bench.below[BLOCK : 2 * BLOCK]
    if pinned is not None:
        with ThreadPoolExecutor(1) as fresh:
            fresh.submit(pinned.close).result()
    assert bench.library.registered == {}


def test_the_mover_keeps_one_batch_queued_behind_the_one_that_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercel.kvcache.store.mover._PIECE_S", 0.0)  # a block is a piece
    waiting: list[int] = []

    class Library(FakeLibrary):
        def _copy_batch(self, *given: Any, **more: Any) -> int:
            status = super()._copy_batch(*given, **more)
            waiting.extend(len(stream.queue) for stream in self.streams.values() if stream.queue)
            return status

    bench = MoverBench(machine=Library().open_device(1 << 20))
    bench.begin(Route.SPILL, slots(1, 3, 5, 7, 9), slots(2, 4, 6, 8, 10))
    assert bench.landings()[0].verdict is Verdict.LANDED
    bench.mover.close()
    assert waiting == [1, 2, 2, 2, 2]


def test_waiting_for_a_stream_blocks_and_a_stream_begins_behind_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch needs a GPU for both, but its arguments can be checked without one."""
    asked: list[object] = []

    class Event:
        def __init__(self, **given: bool) -> None:
            asked.append(given)

        def record(self, stream: object) -> None:
            asked.append(stream)

    class Queue:
        def __init__(self, priority: int) -> None:
            asked.append(priority)

        def wait_stream(self, other: object) -> None:
            asked.append(other)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Queue)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "current")
    stream = open_stream(-1)
    assert asked == [-1, "current"]
    stream.mark()
    assert asked[2] == {"blocking": True} and isinstance(asked[3], Queue)
    stream.start_timer()
    assert asked[4:6] == [{"enable_timing": True, "blocking": True}] * 2


def test_missing_support_for_batches_is_detected_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.pin()
    bench.library.batch_status = NOT_SUPPORTED
    for target in (2, 3):
        bench.lane.copy(bench.extents([(1, target, 1), (5, target + 4, 2)], up=True)).result()
        assert bench.above[target * BLOCK : (target + 1) * BLOCK] == bench.below[BLOCK : 2 * BLOCK]
    assert bench.library.singles == [BLOCK, 2 * BLOCK] * 2
    assert [record.message for record in caplog.records if "batch" in record.message] == [
        "batch copies not supported here: blocks are copied one by one"
    ]


def test_an_old_driver_is_named_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    library = FakeLibrary(0)
    driver = CudaDriver(library)
    driver.open(0)
    assert not driver.has_batch
    assert "no batch copies (CUDA 12.8)" in caplog.text


def test_copies_are_not_batched_if_the_device_maps_locked_memory_differently(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.library.shares_addresses = False
    driver = CudaDriver(bench.library)
    caplog.set_level("INFO")
    driver.open(0)
    assert not driver.has_batch
    assert "blocks are copied one by one" in caplog.text


@pytest.mark.parametrize(("maps", "is_unified"), [(True, True), (True, False), (False, True)])
def test_kernels_address_host_memory_if_it_is_mapped_and_addresses_are_unified(maps: bool, is_unified: bool) -> None:
    library = FakeLibrary()
    library.maps_host, library.has_unified_addresses = maps, is_unified
    assert library.open_device().maps_host_memory == (maps and is_unified)


def test_a_driver_without_a_call_that_is_needed_is_refused() -> None:
    library = FakeLibrary()
    del library.cuGetProcAddress_v2
    with pytest.raises(DeviceError, match="missing=cuGetProcAddress_v2"):
        CudaDriver(library).open(0)


def test_the_attributes_are_laid_out_as_the_driver_reads_them() -> None:
    assert ctypes.sizeof(CopyAttributes) == 24
    raw = np.frombuffer(bytes(CopyAttributes(source_order=SourceOrder.ANY, flags=1)), dtype=np.int32)
    assert raw.tolist() == [3, 0, 0, 0, 0, 1]


def test_a_lost_device_is_recognised_by_asking_it(bench: Bench) -> None:
    compute = bench.device.open_lane()
    odd = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    for status in (0, 600, 900, 908):  # idle, busy, recording a graph
        bench.library.stream_status = status
        assert not compute.is_lost(odd) and not bench.lane.is_lost(odd)
    for status in (ILLEGAL_ADDRESS, 909):  # 909: a timeout, the first number after those of recording
        bench.library.stream_status = status
        assert compute.is_lost(odd) and bench.lane.is_lost(odd)
    assert not compute.is_lost(torch.OutOfMemoryError("CUDA out of memory"))


def test_a_lost_device_lets_its_lanes_close(bench: Bench) -> None:
    bench.lane.copy(bench.extents([(1, 2, 1)], up=True))
    (stream,) = bench.library.streams.values()
    stream.is_dead = True
    bench.lane.close()
    bench.library.single_status = ILLEGAL_ADDRESS
    with pytest.raises(DeviceError, match="ILLEGAL_ADDRESS"):
        bench.lane.copy(bench.extents([(1, 2, 1)], up=True))


def test_a_compute_job_runs_under_its_stream_and_marks_show_its_progress(bench: Bench) -> None:
    lane = bench.device.open_lane()
    stream = list(bench.library.streams.values())[-1]
    order: list[int] = []

    def job() -> int:
        assert stream.depth == 1
        stream.push(lambda: order.append(1))
        return 7

    pending = lane.run(job)
    mark = lane.mark()
    stream.push(lambda: order.append(2))
    assert not mark.is_past() and order == []
    assert pending.result() == 7
    assert mark.is_past() and order == [1]
    lane.close()
    assert order == [1, 2]
