"""Speed of copies between the memory tiers, compared with one plain copy of the same bytes in the same run.

    python benchmarks/copy_speed.py [--blocks 250] [--block-kib 384]
    python benchmarks/copy_speed.py --device cuda --blocks 1024 --block-kib 2048

Prints restores and spills through the mover (runs of many neighbours, and single scattered blocks), each alone and both
at once, and the plain copy. On the CPU also compares a memfd with anonymous memory: reading, writing, and paged
attention.

Exit code 1 if a restore or a spill through the mover reaches less than `--least-share` (0.7) of the plain copy.
"""

import argparse
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch

from tiercel.device.base import CopyLane
from tiercel.device.registry import open_device
from tiercel.engine.attention.grouped import GroupedAttention
from tiercel.engine.forward.state import AttentionParams, ForwardState
from tiercel.kvcache.store.arena import Arena, open_arena
from tiercel.kvcache.store.copy_run import extents_of
from tiercel.kvcache.store.mover import CopyLanes, StoreMover
from tiercel.values.clock import MonotonicClock
from tiercel.values.ids import BlockKey, SlotId
from tiercel.values.tier import KVSpec, Purpose, Route, Transfer

CPU = torch.device("cpu")
ROUNDS = 9


def in_turns(runs: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Return the seconds of each call, measured in turns so that other load meets all of them."""
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name].append(run())
    return times


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


Way = tuple[Route, list[int], list[int]]
"""Route, source slots, target slots."""


def through_mover(mover: StoreMover, woken: threading.Event, *ways: Way) -> float:
    """Return the seconds until all copies have landed."""
    transfers = [
        Transfer(
            number,
            route,
            Purpose.RESTORE,
            tuple(BlockKey(source.to_bytes(32, "big")) for source in sources),
            tuple(map(SlotId, sources)),
            tuple(map(SlotId, targets)),
        )
        for number, (route, sources, targets) in enumerate(ways)
    ]

    def move() -> None:
        mover.start(transfers)
        landed = 0
        while landed < len(transfers):
            woken.wait()
            woken.clear()
            landed += len(mover.poll())

    while mover.num_unsigned:  # signing runs beside the loop; here it would count as part of the next copy
        time.sleep(0.001)
    woken.clear()
    return timed(move)


def plainly(lane: CopyLane, source: Arena, target: Arena, blocks: int, slab_slots: int) -> float:
    """Copy in one call, or in one for each slab of host memory."""
    step = slab_slots or blocks + 1
    borders = [1, *range(step, blocks + 1, step), blocks + 1]
    extents = extents_of(source, target, [(start, start, end - start) for start, end in pairwise(borders)])
    return timed(lambda: lane.copy(extents).result())


def attention_s(arena: Arena, context: int) -> float:
    """One layer, 8 sequences, one query each, blocks in random order."""
    spec, rows = arena.spec, 8
    per_row = context // spec.block_size
    order = list(range(1, arena.blocks + 1))
    random.Random(0).shuffle(order)
    tables = torch.tensor([[order[(row * per_row + at) % len(order)] for at in range(per_row)] for row in range(rows)])
    state = ForwardState.of_slices(tables, [context - 1] * rows, [context] * rows, spec.block_size)
    query = torch.randn(rows, 4 * spec.kv_heads, spec.head_dim)
    row = torch.randn(rows, spec.kv_heads, spec.head_dim)
    backend = GroupedAttention()
    params = AttentionParams(scale=spec.head_dim**-0.5)

    def attend() -> None:
        for layer in range(spec.layers):
            backend.attend(query, row, row, arena.kv[:, layer], state, params)

    return timed(attend)


def compare_arenas(device: Arena, host: Arena) -> None:
    """Compare reading, writing and attention in a memfd and in anonymous memory."""
    context = min(4096, device.blocks * device.spec.block_size)
    arenas = {"anonymous": device, "memfd": host}
    for what, run in {
        "write": lambda arena: timed(lambda: arena.kv.fill_(1.0)),
        "read": lambda arena: timed(lambda: arena.kv.sum()),
        f"attention over {context} tokens": lambda arena: attention_s(arena, context),
    }.items():
        times = in_turns({name: partial(run, arena) for name, arena in arenas.items()})
        parts = ", ".join(
            f"{name} {statistics.median(seconds) * 1e3:.1f} ({min(seconds) * 1e3:.1f}) ms"
            for name, seconds in times.items()
        )
        print(f"{what}: {parts}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--blocks", type=int, default=250)
    parser.add_argument("--block-kib", type=int, default=384)
    parser.add_argument("--least-share", type=float, default=0.7, help="of the plain copy's speed")
    given = parser.parse_args()
    slow: list[str] = []
    spec = KVSpec(layers=given.block_kib // 16, kv_heads=2, head_dim=64, block_size=16, dtype="float32")
    size = given.blocks * spec.block_bytes
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    machine = open_device(given.device)
    device = open_arena(spec, given.blocks, torch.device(machine.name))
    host = open_arena(spec, given.blocks, CPU, os.memfd_create("arena"))
    for arena in (device, host):
        arena.kv.normal_()
    pinned = machine.pin(host.kv.data_ptr(), host.kv.nbytes, spec.block_bytes)
    took_s = timed(pinned.wait)
    if pinned.pinned_bytes:
        print(f"locked {pinned.pinned_bytes / 1e9:.1f} GB of host memory in {took_s:.2f} s")
    slab_slots = pinned.slab_bytes // spec.block_bytes
    lanes = CopyLanes(machine.open_copy_lane(), machine.open_copy_lane(), slab_slots)
    woken = threading.Event()
    mover = StoreMover(device, host, lanes, None, MonotonicClock(), woken.set)
    straight = list(range(1, given.blocks + 1))
    scattered = straight.copy()
    random.Random(1).shuffle(scattered)
    print(f"{given.blocks} blocks of {spec.block_bytes // 1024} KiB, {size / 1e6:.0f} MB; median (best), in turns")
    move = partial(through_mover, mover, woken)
    for route, lane, ends in ((Route.RESTORE, lanes.up, (host, device)), (Route.SPILL, lanes.down, (device, host))):
        name = route.name.lower()
        times = in_turns(
            {
                "plain copy": partial(plainly, lane, *ends, given.blocks, slab_slots),
                f"{name}, neighbours": partial(move, (route, straight, straight)),
                f"{name}, scattered": partial(move, (route, scattered, straight)),
            }
        )
        plain_s = statistics.median(times["plain copy"])
        show(times, size, against=plain_s)
        slow += [what for what, seconds in times.items() if plain_s < given.least_share * statistics.median(seconds)]
    half = given.blocks // 2  # each direction works on its own half of both arenas
    lower, upper = scattered_half(straight[:half]), scattered_half(straight[half : 2 * half])
    both = partial(move, (Route.RESTORE, lower, straight[:half]), (Route.SPILL, upper, straight[half : 2 * half]))
    show(in_turns({"both at once, each way": both}), half * spec.block_bytes)
    mover.close()
    pinned.close()
    if given.device == "cpu":
        compare_arenas(device, host)
    for what in slow:
        print(f"FAILED: {what}: less than {given.least_share:.0%} of the plain copy")
    return int(bool(slow))


def scattered_half(slots: list[int]) -> list[int]:
    """Return half of the slots, scattered."""
    return random.Random(2).sample(slots, len(slots))


def show(times: dict[str, list[float]], size: int, against: float | None = None) -> None:
    """Print the GB/s of a copy of `size` bytes."""
    for what, seconds in times.items():
        median = statistics.median(seconds)
        share = f"{against / median:6.0%} of plain" if against is not None and what != "plain copy" else ""
        print(f"{what:22} {size / median / 1e9:6.2f} ({size / min(seconds) / 1e9:.2f}) GB/s {share}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
