"""Copies between host and device: plain copies of the driver, and copy lanes by piece size and direction."""

import mmap
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.targets import batch_verdict, values_of
from benchmarks.gpu.timing import DEVICE, elapsed_ms
from tiercel.device.base import CopyLane, Device
from tiercel.device.cuda import open_cuda
from tiercel.device.extents import Extents

MIB = 1 << 20
TOTAL_BYTES = 1 << 30  # in each direction
BLOCK_BYTES = 2 * MIB  # 16 tokens of Llama-3-8B
PIECE_KIB = (2048, 64, 16, 4, 28, 256, 512, 8192, 32768)
QUICK_PIECE_KIB = (2048, 64, 8192)
SINGLE_KIB = (2048, 64)  # compared with batches of the same blocks
MAX_PIECES = 8192
GROUP_BLOCKS = 8  # neighbouring blocks that a block allocator is likely to return together
_TURNS = 3

Lanes = tuple[CopyLane, CopyLane]
"""Down (to the host) and up."""


class Ends:
    """Locked host memory and device memory, one pair for each direction."""

    def __init__(self, device: Device, total: int, place: torch.device = DEVICE) -> None:
        self.pages = [mmap.mmap(-1, total) for _ in range(2)]
        self.hosts = [torch.frombuffer(pages, dtype=torch.uint8) for pages in self.pages]
        self.devices = [torch.zeros(total, dtype=torch.uint8, device=place) for _ in range(2)]
        began_s = time.perf_counter()
        self.pinned = [device.pin(host.data_ptr(), total, BLOCK_BYTES) for host in self.hosts]
        for pinned in self.pinned:
            pinned.start()
        for pinned in self.pinned:
            pinned.wait()
        self.pin_s = time.perf_counter() - began_s

    def close(self) -> None:
        """Unlock the host memory."""
        for pinned in self.pinned:
            pinned.close()


def pieces(source: int, target: int, piece_bytes: int, total: int, seed: int, group: int = 1) -> Extents:
    """Return scattered copies: groups of neighbours, with the groups in random places on both sides.

    Shapes: n copies of `group` pieces; no two overlap.
    """
    size = piece_bytes * group
    places = total // size
    count = max(1, min(places, MAX_PIECES))
    rng = random.Random(seed)
    froms, tos = (rng.sample(range(places), count) for _ in range(2))

    def at(start: int, chosen: Sequence[int]) -> np.ndarray:
        return np.array([start + place * size for place in chosen], dtype=np.uint64)

    return Extents(at(source, froms), at(target, tos), np.full(count, size, dtype=np.uint64))


def rate(run: Callable[[], None], size: int, turns: int = _TURNS) -> float:
    """Return GB/s: the median of some runs, after one that is not counted."""
    times: list[float] = []
    for turn in range(turns + 1):
        began_s = time.perf_counter()
        run()
        if turn:
            times.append(time.perf_counter() - began_s)
    return size / sorted(times)[len(times) // 2] / 1e9


def run(bench: Bench) -> None:
    """Figures `plain_*` (the driver alone), `inputs.*`, `down_*`, `up_*`, `both_*` (copy lanes)."""
    device = open_cuda()
    total = TOTAL_BYTES // (2 if bench.is_quick else 1)
    ends = Ends(device, total)
    locked = sum(pinned.pinned_bytes for pinned in ends.pinned)
    bench.record("pin", 2 * total / ends.pin_s / 1e9, "GB/s", locked_bytes=locked, wanted_bytes=2 * total)
    with bench.part("plain"):
        plain(bench, ends, total)
    with bench.part("inputs"):
        # lazy: it imports this module
        from benchmarks.gpu import inputs

        inputs.run(bench, device, ends, total)
    down, up = device.open_copy_lane(), device.open_copy_lane()
    try:
        with bench.part("groups"):
            lanes(bench, ends, total, BLOCK_BYTES // 1024, "groups", (down, up), GROUP_BLOCKS)
        for kib in QUICK_PIECE_KIB if bench.is_quick else PIECE_KIB:
            if bench.has_time(f"{kib} KiB", 1.0):
                with bench.part(f"{kib} KiB"):
                    lanes(bench, ends, total, kib, f"{kib}_kib", (down, up), 1)
        for kib in SINGLE_KIB:
            if bench.has_time(f"{kib} KiB one by one", 1.0):
                with bench.part(f"{kib} KiB one by one"):
                    singly(bench, ends, total, kib)
        print(f"  {batch_verdict(values_of(bench.result.figures))}", flush=True)
    finally:
        down.close()
        up.close()
        ends.close()


def plain(bench: Bench, ends: Ends, total: int) -> None:
    """Measure one large copy of locked memory, queued by torch."""
    (host, other_host), (device, other_device) = ends.hosts, ends.devices
    ways = {"down": (host, device), "up": (device, host)}
    for name, (target, source) in ways.items():
        ms = elapsed_ms(lambda target=target, source=source: target.copy_(source, non_blocking=True))
        bench.record(f"plain_{name}", total / ms / 1e6, "GB/s")
    first, second = torch.cuda.Stream(), torch.cuda.Stream()

    def both() -> None:
        current = torch.cuda.current_stream()
        for stream, target, source in ((first, host, device), (second, other_device, other_host)):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        current.wait_stream(first)
        current.wait_stream(second)

    each = total / elapsed_ms(both) / 1e6
    bench.record("plain_both_down", each, "GB/s", together=2 * each)
    bench.record("plain_both_up", each, "GB/s", together=2 * each)


def lanes(bench: Bench, ends: Ends, total: int, kib: int, name: str, both: Lanes, group: int) -> None:
    """Measure the copy lanes: each direction alone, then both at once until the slower one ends."""
    down, up = both
    spill = pieces(ends.devices[0].data_ptr(), ends.hosts[0].data_ptr(), kib * 1024, total, 1, group)
    restore = pieces(ends.hosts[1].data_ptr(), ends.devices[1].data_ptr(), kib * 1024, total, 2, group)
    jobs = {"down": (down, spill), "up": (up, restore)}
    for way, (lane, extents) in jobs.items():
        size = int(extents.sizes.sum())
        gb_per_s = rate(lambda lane=lane, extents=extents: lane.copy(extents).result(), size)
        bench.record(f"{way}_{name}", gb_per_s, "GB/s", kib=kib * group, copies=len(extents))
    with ThreadPoolExecutor(2) as pool:
        rates = beside(pool, jobs)
    for way, gb_per_s in rates.items():
        bench.record(f"both_{way}_{name}", gb_per_s, "GB/s", kib=kib * group, copies=len(jobs[way][1]))


def beside(pool: ThreadPoolExecutor, jobs: dict[str, tuple[CopyLane, Extents]]) -> dict[str, float]:
    """Return GB/s of both directions, copied repeatedly on a thread each until both have had some turns."""

    def keep(way: str) -> float:
        lane, extents = jobs[way]
        began_s = time.perf_counter()
        turns = 0
        while turns < _TURNS or any(count < _TURNS for count in done.values()):
            lane.copy(extents).result()
            turns += 1
            done[way] = turns
        return turns * int(extents.sizes.sum()) / (time.perf_counter() - began_s) / 1e9

    done = dict.fromkeys(jobs, 0)
    return dict(zip(jobs, pool.map(keep, jobs), strict=True))


def singly(bench: Bench, ends: Ends, total: int, kib: int) -> None:
    """Measure one call per block in each direction, as on a driver without batches."""
    stream, size = torch.cuda.Stream(), kib * 1024
    places = min(total // size, MAX_PIECES)
    order = list(range(places))
    random.Random(3).shuffle(order)
    for way, target, source in (("down", ends.hosts[0], ends.devices[0]), ("up", ends.devices[0], ends.hosts[0])):
        targets, sources = (end[: places * size].view(places, size) for end in (target, source))

        def copy(targets: torch.Tensor = targets, sources: torch.Tensor = sources) -> None:
            with torch.cuda.stream(stream):
                for place in order:
                    targets[place].copy_(sources[place], non_blocking=True)
            stream.synchronize()

        bench.record(f"{way}_{kib}_kib_one_by_one", rate(copy, places * size), "GB/s", kib=kib, copies=places)
