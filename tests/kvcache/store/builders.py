"""Arenas with random bytes, a disk of bytearrays, and a mover between them."""

import threading
import time

import torch

from tiercel.device.base import CopyLane, Device
from tiercel.device.cpu import Done, InlineLane
from tiercel.device.extents import Extents
from tiercel.kvcache.store.arena import Arena, open_arena
from tiercel.kvcache.store.disk import DiskResult, DiskVerdict
from tiercel.kvcache.store.mover import CopyLanes, StoreMover
from tiercel.values.clock import MonotonicClock
from tiercel.values.ids import BlockKey, SlotId
from tiercel.values.tier import KVSpec, Landing, Purpose, Route, Transfer

CPU = torch.device("cpu")
SMALL = KVSpec(layers=3, kv_heads=1, head_dim=5, block_size=3, dtype="bfloat16")  # 180 bytes a block


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


def slots(*numbers: int) -> tuple[SlotId, ...]:
    return tuple(SlotId(number) for number in numbers)


def fill(arena: Arena, seed: int) -> None:
    """Random bytes in every slot."""
    raw = arena.kv.view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))


def content(arena: Arena, slot: int) -> bytes:
    return bytes(arena.slot_bytes(SlotId(slot)))


class StubDisk:
    """Blocks by slot. Every call ends with OK, or with the next of `verdicts` if there is one."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[BlockKey, bytes]] = {}
        self.verdicts: list[DiskVerdict] = []
        self.results: list[DiskResult] = []

    def read(self, ticket: int, slot: int, key: BlockKey, into: memoryview) -> None:
        found = self.blocks.get(slot)
        if found is not None and found[0] == key:
            into[:] = found[1]
        self.report(ticket, DiskVerdict.OK if found is not None and found[0] == key else DiskVerdict.MISS)

    def write(self, ticket: int, slot: int, key: BlockKey, payload: memoryview) -> None:
        self.blocks[slot] = (key, bytes(payload))
        self.report(ticket, DiskVerdict.OK)

    def poll(self) -> list[DiskResult]:
        results, self.results = self.results, []
        return results

    def next_deadline_s(self) -> float | None:
        return None

    def report(self, ticket: int, verdict: DiskVerdict) -> None:
        self.results.append(DiskResult(ticket, self.verdicts.pop(0) if self.verdicts else verdict, 0.001, 0))


class GatedLane:
    """An inline lane that waits before each copy, and may fail."""

    depth = 1

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        self.copies = 0
        self.error: Exception | None = None
        self.is_dead = False

    def copy(self, extents: Extents) -> Done[None]:
        self.gate.acquire()
        self.copies += 1
        if self.error is not None:
            raise self.error
        return InlineLane().copy(extents)

    def is_lost(self, error: Exception) -> bool:
        return self.is_dead

    def close(self) -> None:
        self.gate.release(1000)


class LateCopy:
    """Bytes that arrive when a thread waits for them."""

    def __init__(self, lane: "LateLane", extents: Extents) -> None:
        self._lane = lane
        self._extents = extents

    def result(self) -> None:
        self._lane.ended.append(self)
        if len(self._lane.ended) in self._lane.fails_at:
            raise RuntimeError("no")
        InlineLane().copy(self._extents)


class LateLane:
    """A queue like a stream: what was queued flies until a thread waits for it."""

    depth = 2

    def __init__(self, *fails_at: int) -> None:
        self.fails_at = fails_at  # ends with an error, counted from 1
        self.queued: list[LateCopy] = []
        self.ended: list[LateCopy] = []
        self.max_flying = 0

    def copy(self, extents: Extents) -> LateCopy:
        self.queued.append(LateCopy(self, extents))
        self.max_flying = max(self.max_flying, len(self.queued) - len(self.ended))
        return self.queued[-1]

    def is_lost(self, error: Exception) -> bool:
        return False

    def close(self) -> None:
        pass


class MoverBench:
    """Two arenas of random bytes and a mover between them; `unified` leaves the host arena out."""

    def __init__(
        self,
        spec: KVSpec = SMALL,
        device_blocks: int = 40,
        host_blocks: int = 60,
        *,
        fd: int | None = None,
        is_unified: bool = False,
        lane: CopyLane | None = None,
        slab_slots: int = 0,
        machine: Device | None = None,
    ) -> None:
        self.device = open_arena(spec, device_blocks, CPU, fd if is_unified else None)
        self.host = None if is_unified else open_arena(spec, host_blocks, CPU, fd)
        self.ram = self.host or self.device
        fill(self.device, 1)
        if self.host is not None and not self.host.is_kept:
            fill(self.host, 2)
        self.disk = StubDisk()
        self.wakes = 0
        lanes = CopyLanes(lane or InlineLane(), lane or InlineLane(), slab_slots)
        if machine is not None:
            pinned = machine.pin(self.ram.kv.data_ptr(), self.ram.kv.nbytes, spec.block_bytes)
            pinned.wait()
            slab_slots = pinned.slab_bytes // spec.block_bytes
            lanes = CopyLanes(machine.open_copy_lane(), machine.open_copy_lane(), slab_slots)
        clock = MonotonicClock()
        self.mover = StoreMover(self.device, self.host, lanes, self.disk, clock, self._wake)
        self._next = 0

    def _wake(self) -> None:
        self.wakes += 1

    def begin(
        self,
        route: Route,
        sources: tuple[SlotId, ...],
        targets: tuple[SlotId, ...] = (),
        *,
        keys: tuple[BlockKey, ...] | None = None,
        purpose: Purpose = Purpose.BACKGROUND,
    ) -> int:
        self._next += 1
        names = keys if keys is not None else tuple(key(source) for source in sources)
        self.mover.start([Transfer(self._next, route, purpose, names, sources, targets)])
        return self._next

    def landings(self, count: int = 1, patience_s: float = 10.0) -> list[Landing]:
        """Wait until `count` transfers have landed."""
        end_s = time.monotonic() + patience_s
        found: list[Landing] = []
        while len(found) < count:
            found += self.mover.poll()
            assert time.monotonic() < end_s, f"{len(found)} of {count} landed"
            time.sleep(0.0005)
        return found

    def signed(self, patience_s: float = 10.0) -> None:
        """Wait until every landed copy has its signature."""
        end_s = time.monotonic() + patience_s
        while self.mover.num_unsigned:
            assert time.monotonic() < end_s
            time.sleep(0.0005)
