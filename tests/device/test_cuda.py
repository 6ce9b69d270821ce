"""Tests that need a GPU: real streams, real locking, real copies."""

import ctypes
import mmap
import os
import random

import pytest
import torch

from tiercel.device.cuda import CudaDevice
from tiercel.device.cuda_copy import CudaCopyLane
from tiercel.device.cuda_driver import CudaDriver
from tiercel.device.extents import Extents
from tiercel.device.pinned import PinnedMemory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BLOCK = 256 << 10
BLOCKS = 64
SLAB = 4 << 20


class OldLibrary:
    """libcuda without batch copies."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self.cuGetProcAddress_v2 = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 500)

    def __getattr__(self, name: str) -> object:
        return getattr(self._library, name)


class Bench:
    """A device arena, and a host arena in a memfd."""

    def __init__(self, *, has_batch: bool = True) -> None:
        torch.cuda.init()
        self.driver = CudaDriver(ctypes.CDLL("libcuda.so.1") if has_batch else OldLibrary())
        self.driver.open(torch.cuda.current_device())
        self.device = CudaDevice(self.driver, slab_bytes=SLAB)
        fd = os.memfd_create("host")
        os.ftruncate(fd, BLOCKS * BLOCK)
        self.host = torch.frombuffer(mmap.mmap(fd, BLOCKS * BLOCK), dtype=torch.uint8).view(BLOCKS, BLOCK)
        os.close(fd)
        random_bytes = torch.Generator().manual_seed(0)
        self.host[:] = torch.randint(0, 256, (BLOCKS, BLOCK), dtype=torch.uint8, generator=random_bytes)
        self.above = torch.randint(0, 256, (BLOCKS, BLOCK), dtype=torch.uint8, generator=random_bytes).cuda()
        torch.cuda.synchronize()

    def pin(self) -> PinnedMemory:
        pinned = self.device.pin(self.host.data_ptr(), self.host.nbytes, BLOCK)
        pinned.wait()
        return pinned

    def extents(self, runs: list[tuple[int, int, int]], *, up: bool) -> Extents:
        source, target = (self.host, self.above) if up else (self.above, self.host)
        return Extents.of_runs(runs, source.data_ptr(), target.data_ptr(), BLOCK)


def draw_runs(draw: random.Random, start: int) -> list[tuple[int, int, int]]:
    """Return runs in one half of both arenas: up to eight blocks from a multiple of eight, so none crosses a slab."""
    eights = range(start, start + BLOCKS // 2, 8)
    return [(draw.choice(eights), target, draw.randint(1, 8)) for target in draw.sample(eights, 3)]


def expected_of(source: torch.Tensor, target: torch.Tensor, runs: list[tuple[int, int, int]]) -> torch.Tensor:
    expected, origin = target.cpu().clone(), source.cpu()
    for first, to, blocks in runs:
        expected[to : to + blocks] = origin[first : first + blocks]
    return expected


@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize("has_batch", [False, True])
def test_the_bytes_arrive_both_ways_at_once(is_pinned: bool, has_batch: bool) -> None:
    bench = Bench(has_batch=has_batch)
    assert bench.driver.has_batch == has_batch, "needs CUDA 12.8 or later"
    pinned = bench.pin() if is_pinned else None
    down, up = bench.device.open_copy_lane(), bench.device.open_copy_lane()
    draw = random.Random(1)
    for _ in range(20):
        down_runs, up_runs = draw_runs(draw, 0), draw_runs(draw, BLOCKS // 2)
        below = expected_of(bench.above, bench.host, down_runs)
        above = expected_of(bench.host, bench.above, up_runs)
        pending = [down.copy(bench.extents(down_runs, up=False)), up.copy(bench.extents(up_runs, up=True))]
        for one in pending:
            one.result()
        assert torch.equal(bench.host, below)
        assert torch.equal(bench.above.cpu(), above)
    close(down, up)
    if pinned is not None:
        pinned.close()


def close(*lanes: CudaCopyLane) -> None:
    for lane in lanes:
        lane.close()


def test_a_memfd_is_locked_in_slabs_and_again_by_the_next_engine() -> None:
    bench = Bench()
    assert not bench.host.is_pinned()
    for _ in range(2):
        pinned = bench.pin()
        assert pinned.pinned_bytes == bench.host.nbytes
        assert bench.host.is_pinned()
        pinned.close()
        assert not bench.host.is_pinned()


def test_copies_run_beside_compute_and_marks_show_their_progress() -> None:
    bench = Bench()
    pinned = bench.pin()
    compute, up = bench.device.open_lane(), bench.device.open_copy_lane()
    matrix = torch.randn(4096, 4096, device="cuda")
    compute.run(lambda: matrix @ matrix).result()

    def many() -> torch.Tensor:
        out = matrix
        for _ in range(200):
            out = torch.nn.functional.normalize(out @ matrix)
        return out

    pending = compute.run(many)
    mark = compute.mark()
    up.copy(bench.extents([(0, 0, 8)], up=True)).result()
    was_past = mark.is_past()
    pending.result()
    assert not was_past  # the copy did not wait for the kernels that were queued before it
    assert mark.is_past()
    assert torch.equal(bench.above[:8].cpu(), bench.host[:8])
    close(up)
    pinned.close()


def test_a_shortage_and_a_refused_call_are_not_a_loss() -> None:
    lane = Bench().device.open_lane()
    with pytest.raises(torch.OutOfMemoryError) as full:
        lane.run(lambda: torch.empty(1 << 50, dtype=torch.uint8, device="cuda"))
    assert not lane.is_lost(full.value)
    assert not lane.is_lost(RuntimeError("shapes do not match"))
    lane.close()
