"""The tiers of one engine, opened and closed together: arenas, the volume, and the threads between them."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from tiercel.device.base import Device, Pinned
from tiercel.device.volume import Volume
from tiercel.engine.memory.capacity import is_unified
from tiercel.engine.memory.disk_opening import OPEN_S, open_disk
from tiercel.engine.memory.volume_scan import VolumeScan
from tiercel.kvcache.store.arena import Arena, open_arena
from tiercel.kvcache.store.disk import DiskLanes
from tiercel.kvcache.store.memory_file import identity_of
from tiercel.kvcache.store.mover import CopyLanes, StoreMover
from tiercel.settings.settings import EngineSettings
from tiercel.values.clock import Clock
from tiercel.values.ids import BlockKey, SlotId
from tiercel.values.outcome import DiskState
from tiercel.values.tier import Capacity, KVSpec

log = logging.getLogger(__name__)

_CLOSE_S = 5.0  # to wait for writes in progress


class Tiers:
    """The tiers that `open_tiers` opened, and the mover between them."""

    def __init__(
        self,
        device: Arena,
        host: Arena | None,
        volume: Volume | None,
        disk: DiskLanes | None,
        lanes: CopyLanes | None,
        mover: StoreMover,
        machine: Device,
        pinned: Pinned | None,
        closing: ExitStack,
        volume_closing: ExitStack,
        *,
        lacks_disk: bool = False,
    ) -> None:
        """`lacks_disk`: the SSD tier is in the settings, but its folders could not be used."""
        self.device = device
        self.host = host  # None: the device arena is also the host tier
        self.lanes = lanes  # between the device arena and the host arena
        self.volume = volume
        self.disk = disk
        self.mover = mover
        self.scan: VolumeScan | None = None  # after `start_scan`
        self._machine = machine
        self._pinned = pinned
        self._closing = closing
        self._volume_closing = volume_closing
        self._lacks_disk = lacks_disk
        self._is_released = False  # another daemon may have the volume

    @property
    def ram(self) -> Arena:
        """The arena of the host tier."""
        return self.host or self.device

    @property
    def disk_state(self) -> DiskState:
        """The state of the SSD tier."""
        match self.disk:
            case None:
                return DiskState.OFF if self._lacks_disk else DiskState.NONE
            case lanes if lanes.is_off or self._is_released:
                return DiskState.OFF
            case lanes if lanes.is_read_only:
                return DiskState.READ_ONLY
            case _:
                return DiskState.ON

    def host_records(self) -> Iterator[tuple[SlotId, BlockKey]]:
        """Yield slot and key of the blocks that an earlier engine left in the host tier; verify them before use."""
        if self.ram.is_kept and self.ram.journal is not None:
            yield from self.ram.journal.records()

    def start_locking(self) -> None:
        """Start to lock the memory of the host tier for the copy engines; copies of unlocked memory are slower."""
        if self._pinned is not None:
            self._pinned.start()

    def start_scan(self, wake: Callable[[], None], entries: Iterable[tuple[int, bytes]] | None = None) -> None:
        """Start to read the entries of the volume. `entries` replaces those of `Volume.recover` in tests."""
        if self.volume is not None:
            self.scan = VolumeScan(entries if entries is not None else self.volume.recover(), wake)
            self.scan.start()

    @contextmanager
    def trial_arenas(self, blocks: int) -> Iterator[tuple[Arena, Arena]]:
        """Open two arenas for measuring copies, one in device memory and one in host memory."""
        above = open_arena(self.device.spec, blocks, self.device.kv.device)
        below = open_arena(self.device.spec, blocks, torch.device("cpu"))
        pinned = _pin(self._machine, below)
        pinned.wait()
        try:
            yield above, below
        finally:
            pinned.close()

    def release_disk(self) -> bool:
        """Close the volume for good, after the calls under way. Return False if one of them hangs: the volume is open.

        May run on another thread than the loop's; what is asked of the disk from now on fails.
        Cost: up to 10 s, and the last sync.
        """
        self._is_released = True
        if self.scan is not None:
            self.scan.close()
        if self.disk is not None and not self.disk.close(_CLOSE_S):
            return False
        self._volume_closing.close()
        return True

    def close(self) -> None:
        """Wait for writes to the disk, then release everything. The arenas' memory is freed with its last tensor."""
        if self.scan is not None:
            self.scan.close()
        try:
            self.mover.close()
        finally:
            if self._pinned is not None:
                self._pinned.close()
        if self.disk is not None and not self.disk.close(_CLOSE_S):
            log.warning("kv disk call still under way: the volume stays open until the process ends")
            return
        self._closing.close()


def open_tiers(
    settings: EngineSettings,
    spec: KVSpec,
    capacity: Capacity,
    device: Device,
    clock: Clock,
    arena_fd: int | None,
    fingerprint: bytes,
    wake: Callable[[], None],
    *,
    disk_limit_s: float = OPEN_S,
) -> Tiers:
    """Open every tier that has blocks in `capacity`, and the mover between them.

    `arena_fd` is a memfd for the host tier that outlives this process. `wake` is called from other threads when the
    mover or the scan has results. With `settings.kv_disk_optional` a volume that cannot be opened, or not within
    `disk_limit_s`, is an SSD tier that is off. Errors: ConfigError with the line to print.
    """
    torch_device, cpu = torch.device(device.name), torch.device("cpu")
    unified = is_unified(settings, device)
    arena = open_arena(spec, capacity.blocks, torch_device, arena_fd if unified else None, fingerprint)
    host, lanes, pinned = None, None, None
    with ExitStack() as closing:
        if capacity.host_blocks:
            host = open_arena(spec, capacity.host_blocks, cpu, arena_fd, fingerprint)
            pinned = _pin(device, host)
            closing.callback(pinned.close)
            slab_slots = pinned.slab_bytes // spec.block_bytes
            lanes = CopyLanes(down=device.open_copy_lane(), up=device.open_copy_lane(), slab_slots=slab_slots)
        volume, disk = None, None
        volume_closing = closing.enter_context(ExitStack())
        if capacity.disk_blocks:
            identity = identity_of(spec, fingerprint)
            volume = open_disk(settings, spec.block_bytes, identity, volume_closing, disk_limit_s)
        if volume is not None:
            disk = DiskLanes(volume, clock, wake)
            disk.start()
        mover = StoreMover(arena, host, lanes, disk, clock, wake)
        lacks_disk = volume is None and capacity.disk_blocks > 0
        parts = (arena, host, volume, disk, lanes, mover, device, pinned, closing.pop_all(), volume_closing)
        return Tiers(*parts, lacks_disk=lacks_disk)


def _pin(machine: Device, host: Arena) -> Pinned:
    """Prepare host memory for locking; a later engine locks the same memory again."""
    return machine.pin(host.kv.data_ptr(), host.kv.nbytes, host.spec.block_bytes)
