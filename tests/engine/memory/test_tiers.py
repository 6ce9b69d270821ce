"""All tiers opened together: blocks are spilled to the disk and restored, also after a restart."""

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tiercel.device.cpu import CpuDevice
from tiercel.device.pinned import PinnedMemory
from tiercel.device.volume_format import VOLUME_NAME
from tiercel.engine.memory.capacity import size_pool
from tiercel.engine.memory.tiers import Tiers, open_tiers
from tiercel.engine.memory.volume_scan import VolumeScan
from tiercel.engine.wake import Wake
from tiercel.kvcache.store.memory_file import kept_memory
from tiercel.settings.settings import EngineSettings
from tiercel.system.kv_folder import holds_lock, lock_folder, lock_holder
from tiercel.values.clock import MonotonicClock
from tiercel.values.errors import ConfigError
from tiercel.values.ids import BlockKey, SlotId
from tiercel.values.outcome import DiskState
from tiercel.values.tier import Capacity, KVSpec, Landing, Purpose, Route, Transfer, Verdict
from tiercel.values.units import MIB

SPEC = KVSpec(layers=2, kv_heads=2, head_dim=32, block_size=16, dtype="float32")  # 16 KiB a block


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


class Bench:
    """Several engines in a row on one memfd and one folder."""

    def __init__(self, folder: Path, fd: int) -> None:
        self.folder = folder
        self.fd = fd
        self.wake = Wake.open()
        self._next = 0

    def open(
        self,
        fingerprint: bytes = b"model",
        device: CpuDevice | None = None,
        disk_limit_s: float = 30.0,
        **changes: Any,
    ) -> Tiers:
        settings = EngineSettings(
            model="unused",
            kv_cache_memory_bytes=MIB,
            kv_host_bytes=2 * MIB,
            kv_disk_paths=(str(self.folder),),
            kv_disk_bytes=8 * MIB,
            **changes,
        )
        device = device or CpuDevice(1)
        kept = kept_memory(self.fd, SPEC, fingerprint)
        self.capacity: Capacity = size_pool(settings, SPEC, device, 64, 0, kept)
        parts = (settings, SPEC, self.capacity, device, MonotonicClock(), self.fd, fingerprint, self.wake.set)
        return open_tiers(*parts, disk_limit_s=disk_limit_s)

    def move(self, tiers: Tiers, route: Route, source: int, target: int, name: int) -> Landing:
        self._next += 1
        transfer = Transfer(self._next, route, Purpose.PREFETCH, (key(name),), (SlotId(source),), (SlotId(target),))
        tiers.mover.start([transfer])
        return self.until(tiers.mover.poll)[0]

    def until(self, ask: Callable[[], Any]) -> Any:
        end_s = time.monotonic() + 10
        while not (answer := ask()):
            assert time.monotonic() < end_s
            time.sleep(0.001)
        return answer


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    fd = os.memfd_create("arena")
    yield Bench(tmp_path / "kv", fd)
    os.close(fd)


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_block_survives_every_tier_and_every_restart(bench: Bench, is_apart: bool) -> None:
    tiers = bench.open(cpu_device_pool=is_apart)
    assert (tiers.host is not None) == is_apart
    assert tiers.disk_state is DiskState.ON
    assert list(tiers.host_records()) == []
    payload = torch.randn(tiers.device.kv[0].shape)
    tiers.device.kv[5] = payload
    down = bench.move(tiers, Route.SPILL, 5, 9, 1) if is_apart else bench.move(tiers, Route.SIGN, 5, 5, 1)
    assert down.verdict is Verdict.LANDED
    bench.until(lambda: not tiers.mover.num_unsigned)
    at = 9 if is_apart else 5
    assert bench.move(tiers, Route.PERSIST, at, 3, 1).verdict is Verdict.LANDED
    del tiers  # a crash: nothing is closed

    again = Bench(bench.folder.with_name("other"), bench.fd)
    tiers = again.open(cpu_device_pool=is_apart)
    assert tiers.ram.is_kept
    assert list(tiers.host_records()) == [(at, key(1))]
    assert again.move(tiers, Route.VERIFY, at, at, 1).verdict is Verdict.LANDED
    assert torch.equal(tiers.ram.kv[at], payload)
    if is_apart:
        assert again.move(tiers, Route.RESTORE, at, 2, 1).verdict is Verdict.LANDED
        assert torch.equal(tiers.device.kv[2], payload)
    tiers.close()


def test_a_restart_of_the_daemon_finds_the_blocks_on_the_disk(bench: Bench) -> None:
    tiers = bench.open()
    payload = torch.randn(tiers.device.kv[0].shape)
    tiers.device.kv[5] = payload
    assert bench.move(tiers, Route.PERSIST, 5, 3, 1).verdict is Verdict.LANDED
    tiers.close()

    fd = os.memfd_create("arena")
    again = Bench(bench.folder, fd)
    tiers = again.open()
    assert list(tiers.host_records()) == []
    tiers.start_scan(again.wake.set)
    scan = tiers.scan
    assert scan is not None
    assert again.until(scan.take) == [(3, key(1))]
    again.until(lambda: scan.is_done)
    assert again.move(tiers, Route.PREFETCH, 3, 7, 1).verdict is Verdict.LANDED
    assert torch.equal(tiers.ram.kv[7], payload)
    assert again.move(tiers, Route.PREFETCH, 3, 8, 2).verdict is Verdict.MISS
    tiers.close()
    os.close(fd)


class LockNow(PinnedMemory):
    """Pinned memory that notes its calls."""

    def start(self) -> None:
        super().start()
        self._thread.join()


class LockingDevice(CpuDevice):
    """A CPU device that records the slabs to be locked."""

    def __init__(self) -> None:
        super().__init__(1)
        self.locked: dict[int, int] = {}

    def pin(self, address: int, size: int, block_bytes: int) -> PinnedMemory:  # type: ignore[override]
        return LockNow(address, size, block_bytes, self.locked.__setitem__, self.locked.__delitem__, 1 << 18)


def test_the_host_tier_is_locked_while_it_is_open_and_no_copy_crosses_a_slab(bench: Bench) -> None:
    machine = LockingDevice()
    tiers = bench.open(cpu_device_pool=True, device=machine)
    assert tiers.host is not None and tiers.lanes is not None
    assert machine.locked == {}
    tiers.start_locking()
    assert sum(machine.locked.values()) == tiers.host.kv.nbytes
    assert min(machine.locked) == tiers.host.kv.data_ptr()
    assert tiers.lanes.slab_slots == (1 << 18) // SPEC.block_bytes == 16
    before = dict(machine.locked)
    with tiers.trial_arenas(3) as (_, below):
        assert machine.locked[below.kv.data_ptr()] == below.kv.nbytes
    assert machine.locked == before
    tiers.close()
    assert machine.locked == {}


def test_the_host_tier_stays_locked_until_no_copy_is_under_way(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = LockingDevice()
    tiers = bench.open(cpu_device_pool=True, device=machine)
    close, locked = tiers.mover.close, []

    def close_mover() -> None:
        close()
        locked.append(len(machine.locked))

    # Patched: the order of closing within `close` has no other observer.
    monkeypatch.setattr(tiers.mover, "close", close_mover)
    tiers.start_locking()
    every_slab = len(machine.locked)
    tiers.close()
    assert locked == [every_slab] != [0]
    assert machine.locked == {}


def test_nothing_stays_locked_when_another_tier_does_not_open(bench: Bench) -> None:
    bench.folder.write_text("no folder")
    machine = LockingDevice()
    with pytest.raises(ConfigError):
        bench.open(cpu_device_pool=True, device=machine)
    assert machine.locked == {}


def put_a_file(folder: Path) -> None:
    folder.write_text("no folder")


def put_a_folder_for_the_lock(folder: Path) -> None:
    folder.mkdir(0o700)
    (folder / "tiercel-kv.lock").mkdir()


def put_a_link(folder: Path) -> None:
    folder.mkdir(0o700)
    (folder / VOLUME_NAME).symlink_to("/dev/null")


def open_to_others(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o755)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (put_a_file, "EEXIST"),
        (put_a_folder_for_the_lock, "EISDIR"),
        (put_a_link, "ELOOP"),
        (open_to_others, "kv.open_folder"),
    ],
)
def test_a_folder_that_cannot_be_used_ends_a_start_unless_the_disk_is_optional(
    bench: Bench, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None], error: str
) -> None:
    spoil(bench.folder)
    with pytest.raises(ConfigError, match=str(bench.folder)):
        bench.open()
    tiers = bench.open(kv_disk_optional=True)
    assert (tiers.volume, tiers.disk, tiers.disk_state) == (None, None, DiskState.OFF)
    (said,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert f"folders={bench.folder} error={error} " in said.getMessage()
    assert Route.PERSIST not in {route.route for route in tiers.mover.gauges()}
    assert tiers.release_disk()
    tiers.close()


def test_a_disk_that_does_not_answer_is_a_tier_that_is_off(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def hang(*_: object) -> None:
        answers.wait()
        raise OSError(errno.EIO, "too late")

    monkeypatch.setattr("tiercel.engine.memory.disk_opening.open_volume", hang)
    tiers = bench.open(kv_disk_optional=True, disk_limit_s=0.01)
    answers.set()
    assert tiers.disk_state is DiskState.OFF
    assert "error=ETIMEDOUT" in caplog.text
    tiers.close()


def test_a_folder_that_another_daemon_has_locked_is_not_used(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """The lock of this engine's daemon is on a folder that was deleted; another daemon has the new one."""
    old = lock_folder(bench.folder)
    shutil.rmtree(bench.folder)
    assert not holds_lock(bench.folder)
    hold = f"import pathlib; from tiercel.system.kv_folder import *; lock_folder(pathlib.Path({str(bench.folder)!r}))"
    with subprocess.Popen(
        [sys.executable, "-c", f"{hold}; print('held', flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as other:  # fmt: skip
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        tiers = bench.open(kv_disk_optional=True)
        assert tiers.disk_state is DiskState.OFF
        assert f"in use by the daemon with pid {other.pid}" in caplog.text
        tiers.close()
        other.communicate("\n")
    tiers = bench.open(kv_disk_optional=True)
    assert tiers.disk_state is DiskState.ON
    assert lock_holder(bench.folder) == os.getpid()
    assert tiers.release_disk()
    assert lock_holder(bench.folder) is None
    tiers.close()
    os.close(old)


def test_an_inherited_lock_is_enough(bench: Bench) -> None:
    inherited = lock_folder(bench.folder)
    assert holds_lock(bench.folder)
    tiers = bench.open()
    assert tiers.disk_state is DiskState.ON
    assert tiers.release_disk()
    assert lock_holder(bench.folder) == os.getpid()
    tiers.close()
    os.close(inherited)


def test_another_model_finds_nothing(bench: Bench) -> None:
    tiers = bench.open()
    bench.move(tiers, Route.SIGN, 5, 5, 1)
    bench.move(tiers, Route.PERSIST, 5, 3, 1)
    tiers.close()
    tiers = bench.open(b"other")
    assert not tiers.ram.is_kept
    tiers.start_scan(bench.wake.set)
    assert tiers.scan is not None
    bench.until(lambda: tiers.scan is not None and tiers.scan.is_done)
    assert list(tiers.host_records()) == []
    tiers.close()


def test_a_kept_arena_keeps_its_size(bench: Bench) -> None:
    tiers = bench.open()
    before = bench.capacity
    assert before.blocks == (MIB + 2 * MIB) // SPEC.block_bytes - 1
    assert before.disk_blocks == tiers.volume.slots if tiers.volume else False
    tiers.close()
    tiers = bench.open(num_gpu_blocks_override=10)
    assert bench.capacity.blocks == before.blocks and tiers.ram.is_kept
    tiers.close()


def test_the_scan_is_taken_in_batches_and_can_be_closed() -> None:
    wakes: list[int] = []
    scan = VolumeScan([(slot, bytes(key(slot))) for slot in range(1000)], lambda: wakes.append(1))
    scan.start()
    found: list[tuple[SlotId, BlockKey]] = []
    end_s = time.monotonic() + 10
    while not scan.is_done:
        found += scan.take(100)
        assert time.monotonic() < end_s
    assert found == [(slot + 1, key(slot)) for slot in range(1000)]
    assert wakes
    endless = VolumeScan(((slot, bytes(key(slot))) for slot in range(10**9)), lambda: None)
    endless.start()
    endless.close()
    assert not endless.is_done


def test_several_wake_ups_are_one() -> None:
    wake = Wake.open()
    wake.set()
    wake.set()
    assert os.eventfd_read(wake.fileno()) == 2
    wake.clear()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(wake.fileno())
    wake.close()
