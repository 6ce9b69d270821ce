"""How fast blocks move between the memory tiers, beside a plain memcpy of the same bytes in the same run.

    python benchmarks/copy_speed.py [--blocks 250] [--block-kib 384]

Prints restores and spills through the mover (runs of many neighbours, and single scattered blocks), the memcpy, and
what a memfd costs against anonymous memory: reading, writing, and paged attention.
"""

import argparse
import ctypes
import os
import random
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial

import torch

from device.cpu import CpuDevice
from engine.attention.base import AttentionParams, ForwardState
from engine.attention.grouped import GroupedAttention
from kvcache.store.arena import Arena, open_arena
from kvcache.store.mover import CopyLanes, StoreMover
from tiercel.clock import MonotonicClock
from tiercel.ids import BlockKey, SlotId
from tiercel.tier import KVSpec, Purpose, Route, Transfer

CPU = torch.device("cpu")
ROUNDS = 9


def in_turns(runs: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Seconds of each, round by round: whatever else the machine does meets all of them."""
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


def through_mover(
    mover: StoreMover, woken: threading.Event, route: Route, sources: list[int], targets: list[int]
) -> float:
    keys = tuple(BlockKey(number.to_bytes(32, "big")) for number in sources)
    transfer = Transfer(1, route, Purpose.RESTORE, keys, tuple(map(SlotId, sources)), tuple(map(SlotId, targets)))

    def move() -> None:
        mover.start([transfer])
        woken.wait()

    while mover.num_unsigned:  # signing goes on beside the loop; here it would be measured with the next copy
        time.sleep(0.001)
    woken.clear()
    took = timed(move)
    mover.poll()
    return took


def memcpy(source: Arena, target: Arena, size: int) -> float:
    return timed(lambda: ctypes.memmove(target.kv.data_ptr(), source.kv.data_ptr(), size))


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=250)
    parser.add_argument("--block-kib", type=int, default=384)
    given = parser.parse_args()
    spec = KVSpec(layers=given.block_kib // 16, kv_heads=2, head_dim=64, block_size=16, dtype="float32")
    size = given.blocks * spec.block_bytes
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    device = open_arena(spec, given.blocks, CPU)
    host = open_arena(spec, given.blocks, CPU, os.memfd_create("arena"))
    for arena in (device, host):
        arena.kv.normal_()
    inline = CpuDevice().open_copy_lane()
    woken = threading.Event()
    mover = StoreMover(device, host, CopyLanes(inline, inline), None, MonotonicClock(), woken.set)
    straight = list(range(1, given.blocks + 1))
    scattered = straight.copy()
    random.Random(1).shuffle(scattered)
    print(f"{given.blocks} blocks of {spec.block_bytes // 1024} KiB, {size / 1e6:.0f} MB; median (best), in turns")
    move = partial(through_mover, mover, woken)
    for route, ends in ((Route.RESTORE, (host, device)), (Route.SPILL, (device, host))):
        name = route.name.lower()
        times = in_turns(
            {
                "memcpy": partial(memcpy, *ends, size),
                f"{name}, neighbours": partial(move, route, straight, straight),
                f"{name}, scattered": partial(move, route, scattered, straight),
            }
        )
        against = statistics.median(times["memcpy"])
        for what, seconds in times.items():
            median = statistics.median(seconds)
            share = f"{against / median:6.0%} of memcpy" if what != "memcpy" else ""
            print(f"{what:22} {size / median / 1e9:6.2f} ({size / min(seconds) / 1e9:.2f}) GB/s {share}", flush=True)
    mover.close()
    context = min(4096, given.blocks * spec.block_size)
    arenas = {"anonymous": device, "memfd": host}
    for what, run in {
        "write": lambda arena: timed(lambda: arena.kv.fill_(1.0)),
        "read": lambda arena: timed(lambda: arena.kv.sum()),
        f"attention over {context} tokens": lambda arena: attention_s(arena, context),
    }.items():
        times = in_turns({name: partial(run, arena) for name, arena in arenas.items()})
        told = ", ".join(
            f"{name} {statistics.median(seconds) * 1e3:.1f} ({min(seconds) * 1e3:.1f}) ms"
            for name, seconds in times.items()
        )
        print(f"{what}: {told}", flush=True)


if __name__ == "__main__":
    main()
