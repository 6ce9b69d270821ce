"""Continuous copies in both directions, beside other work."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from benchmarks.gpu.copies import BLOCK_BYTES, GROUP_BLOCKS, Ends, pieces
from tiercel.device.base import Device, Pending
from tiercel.device.extents import Extents

PIECE_GROUPS = 4  # groups of blocks that are copied in about a millisecond, as the mover's pieces are


class Traffic:
    """Two copy lanes, kept busy by two threads between `__enter__` and `__exit__`.

    As many batches are queued as the mover queues, the depth of the lane, so that no copy engine waits for a thread.
    """

    def __init__(self, device: Device, ends: Ends, total: int, batch_groups: int = PIECE_GROUPS) -> None:
        """`batch_groups`: groups of blocks of one batch."""
        hosts, devices = ends.hosts, ends.devices
        down = pieces(devices[0].data_ptr(), hosts[0].data_ptr(), BLOCK_BYTES, total, 1, GROUP_BLOCKS)
        up = pieces(hosts[1].data_ptr(), devices[1].data_ptr(), BLOCK_BYTES, total, 2, GROUP_BLOCKS)
        self._jobs = {"down": (device.open_copy_lane(), down), "up": (device.open_copy_lane(), up)}
        self._batch_groups = batch_groups
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._began_s = 0.0
        self._bytes = dict.fromkeys(self._jobs, 0)
        self.gb_per_s = dict.fromkeys(self._jobs, 0.0)  # of each direction, after the end

    def __enter__(self) -> Self:
        self._is_over.clear()
        self._bytes = dict.fromkeys(self._jobs, 0)
        self._threads = [threading.Thread(target=self._keep, args=(way,), daemon=True) for way in self._jobs]
        self._began_s = time.perf_counter()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        took_s = time.perf_counter() - self._began_s
        self.gb_per_s = {way: size / took_s / 1e9 for way, size in self._bytes.items()}

    def close(self) -> None:
        """Close the lanes."""
        for lane, _ in self._jobs.values():
            lane.close()

    def _keep(self, way: str) -> None:
        lane, extents = self._jobs[way]
        queued: deque[tuple[Pending[None], int]] = deque()
        for batch in _batches(extents, self._batch_groups, self._is_over):
            queued.append((lane.copy(batch), int(batch.sizes.sum())))
            if len(queued) >= lane.depth:
                self._wait(way, queued)
        while queued:
            self._wait(way, queued)

    def _wait(self, way: str, queued: deque[tuple[Pending[None], int]]) -> None:
        copy, size = queued.popleft()
        copy.result()
        self._bytes[way] += size


def _batches(extents: Extents, per_batch: int, is_over: threading.Event) -> Iterator[Extents]:
    """Yield the copies in batches, again and again, until stopped."""
    at = 0
    while not is_over.is_set():
        chosen = slice(at, at + per_batch)
        yield Extents(extents.sources[chosen], extents.targets[chosen], extents.sizes[chosen])
        at = at + per_batch if at + per_batch < len(extents) else 0
