"""A volume returns the bytes that were written, or a miss, whatever happens to its files."""

import ctypes
import errno
import fcntl
import hashlib
import logging
import mmap
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tiercel.device.volume import Volume, open_volume
from tiercel.device.volume_file import FileCalls, is_aligned
from tiercel.device.volume_format import ALIGN, JOURNAL_NAME, VOLUME_NAME, slot_bytes
from tiercel.device.volume_layout import fit_layout
from tiercel.system.kv_folder import LOCK_NAME, lock_folder, lock_holder
from tiercel.values.errors import ConfigError

BLOCK = 12_288
CAPACITY = 1 << 20
KIND = b"model and layout"
BLOCK_SIZES = [12_288, 5_000, 1]


def key_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def block_of(number: int, size: int = BLOCK) -> bytes:
    return hashlib.shake_128(number.to_bytes(8, "little")).digest(size)


def aligned(size: int, offset: int = 0) -> memoryview:
    return memoryview(mmap.mmap(-1, size + 2 * ALIGN))[offset : offset + size]


def make(folder: Path, *, block: int = BLOCK, kind: bytes = KIND, calls: FileCalls | None = None) -> Volume:
    return open_volume((folder,), CAPACITY, block, kind, calls=calls)


def put(volume: Volume, slot: int, number: int) -> bytes:
    return volume.write(slot, key_of(number), memoryview(block_of(number, volume.block_bytes)))


def got(volume: Volume, slot: int, number: int) -> bytes | None:
    into = memoryview(bytearray(volume.block_bytes))
    return bytes(into) if volume.read(slot, key_of(number), into) else None


def only_buffered(fd: int, parts: Sequence[memoryview], at: int) -> int:
    """A file system without direct I/O."""
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
        raise OSError(errno.EINVAL, "Invalid argument")
    return os.preadv(fd, parts, at)


def disk_bytes(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in (folder, *folder.rglob("*")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def test_buffers_at_any_address_give_the_same_bytes(folder: Path) -> None:
    for size in BLOCK_SIZES:
        with make(folder, block=size, kind=f"kind {size}".encode()) as volume:
            for slot, offset in enumerate((0, 1, 512, ALIGN - 1)):
                payload = aligned(size, offset)
                payload[:] = block_of(slot, size)
                assert len(volume.write(slot, key_of(slot), payload)) == 16
                for at in (0, 1, 4095):
                    into = aligned(size, at)
                    assert volume.read(slot, key_of(slot), into)
                    assert into == block_of(slot, size)


def test_aligned_memory_is_used_in_place(folder: Path) -> None:
    seen: list[int] = []

    def watch(call: Callable[[int, Sequence[memoryview], int], int]) -> Callable[[int, Sequence[memoryview], int], int]:
        def watched(fd: int, parts: Sequence[memoryview], at: int) -> int:
            seen.extend(ctypes.addressof(ctypes.c_char.from_buffer(part)) for part in parts[1:])
            return call(fd, parts, at)

        return watched

    calls = FileCalls(preadv=watch(os.preadv), pwritev=watch(os.pwritev))
    with make(folder, calls=calls) as volume:
        if not volume.is_direct:
            pytest.skip("the file system of the temporary folder knows no direct I/O")
        buffer = aligned(BLOCK)
        assert is_aligned(buffer)
        buffer[:] = block_of(1)
        volume.write(0, key_of(1), buffer)
        assert volume.read(0, key_of(1), buffer)
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        assert seen == [address, address]
        volume.write(0, key_of(1), buffer[1:])
        assert seen[2] != address + 1


def test_a_file_system_without_direct_io_is_supported(folder: Path) -> None:
    with make(folder, calls=FileCalls(preadv=only_buffered)) as volume:
        assert not volume.is_direct
        put(volume, 3, 7)
        assert got(volume, 3, 7) == block_of(7)
        volume.sync()
    with make(folder) as volume:
        assert list(volume.recover()) == [(3, key_of(7))]
        assert got(volume, 3, 7) == block_of(7)


def test_a_file_that_was_deleted_is_an_error_at_the_next_sync(folder: Path) -> None:
    volume = make(folder)
    put(volume, 0, 1)
    volume.sync()
    shutil.rmtree(folder)
    put(volume, 1, 2)
    with pytest.raises(FileNotFoundError, match="deleted while it was in use"):
        volume.sync()
    volume.close()


def test_blocks_survive_a_restart(folder: Path) -> None:
    with make(folder) as volume:
        for slot in range(10):
            put(volume, slot, slot)
    with make(folder) as volume:
        assert [slot for slot, _ in volume.recover()] == [*range(10)]
        for slot, key in volume.recover():
            assert key == key_of(slot)
            assert got(volume, slot, slot) == block_of(slot)


def test_a_shorter_block_is_found_under_its_own_length_only(folder: Path) -> None:
    with make(folder) as volume:
        volume.write(0, key_of(1), memoryview(b"short"))
        into = memoryview(bytearray(5))
        assert volume.read(0, key_of(1), into)
        assert into == b"short"
        assert not volume.read(0, key_of(1), memoryview(bytearray(6)))
        assert got(volume, 0, 1) is None


@pytest.mark.parametrize("where", ["payload", "header"])
def test_a_flipped_bit_is_a_miss(folder: Path, where: str) -> None:
    rng = random.Random(where)
    with make(folder) as volume:
        put(volume, 5, 5)
    path = folder / VOLUME_NAME
    start = ALIGN + 5 * slot_bytes(BLOCK)
    span = (start, start + ALIGN) if where == "header" else (start + ALIGN, start + ALIGN + BLOCK)
    offsets = [span[0], span[1] - 1, *(rng.randrange(*span) for _ in range(60))]
    with make(folder) as volume, path.open("r+b", buffering=0) as file:
        for offset in offsets:
            before = os.pread(file.fileno(), 1, offset)
            os.pwrite(file.fileno(), bytes([before[0] ^ 1 << rng.randrange(8)]), offset)
            assert got(volume, 5, 5) is None, offset
            os.pwrite(file.fileno(), before, offset)
            assert got(volume, 5, 5) == block_of(5)


def test_swapped_slots_and_foreign_keys_are_misses(folder: Path) -> None:
    size = slot_bytes(BLOCK)
    with make(folder) as volume:
        put(volume, 0, 10)
        put(volume, 1, 11)
        assert got(volume, 0, 11) is None
        with (folder / VOLUME_NAME).open("r+b", buffering=0) as file:
            first, second = (os.pread(file.fileno(), size, ALIGN + slot * size) for slot in (0, 1))
            os.pwrite(file.fileno(), second + first, ALIGN)
        assert [got(volume, slot, number) for slot in (0, 1) for number in (10, 11)] == [None] * 4
        put(volume, 1, 12)
        assert got(volume, 1, 11) is None  # stale
        assert got(volume, 1, 12) == block_of(12)


def test_a_slot_of_an_earlier_volume_is_a_miss(folder: Path) -> None:
    size = slot_bytes(BLOCK)
    with make(folder) as volume:
        put(volume, 0, 1)
    old = (folder / VOLUME_NAME).read_bytes()[ALIGN : ALIGN + size]
    (folder / VOLUME_NAME).unlink()
    with make(folder) as volume:
        with (folder / VOLUME_NAME).open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), old, ALIGN)
        assert got(volume, 0, 1) is None
    (folder / JOURNAL_NAME).unlink()
    with make(folder) as volume:
        assert list(volume.recover()) == []


def test_a_block_of_a_truncated_file_is_a_miss(folder: Path) -> None:
    with make(folder) as volume:
        put(volume, 0, 1)
        os.truncate(folder / VOLUME_NAME, ALIGN + ALIGN + 100)
        assert got(volume, 0, 1) is None
    with make(folder) as volume:
        assert list(volume.recover()) == []
        put(volume, 0, 1)
        assert got(volume, 0, 1) == block_of(1)


def test_a_short_read_is_a_miss_and_a_short_write_an_error(folder: Path) -> None:
    cut = {"read": 0, "write": 0}

    def read(fd: int, parts: Sequence[memoryview], at: int) -> int:
        return os.preadv(fd, parts, at) - cut["read"]

    def write(fd: int, parts: Sequence[memoryview], at: int) -> int:
        if cut["write"]:
            return os.pwritev(fd, [parts[0]], at)  # the header arrives, the payload does not
        return os.pwritev(fd, parts, at)

    with make(folder, calls=FileCalls(preadv=read, pwritev=write)) as volume:
        put(volume, 0, 1)
        cut["read"] = 1
        assert got(volume, 0, 1) is None
        cut["read"] = 0
        assert got(volume, 0, 1) == block_of(1)
        cut["write"] = 1
        with pytest.raises(OSError, match="short write"):
            put(volume, 0, 2)
        assert got(volume, 0, 1) is None
        assert got(volume, 0, 2) is None


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_errors_of_the_disk_are_raised(folder: Path, code: int) -> None:
    is_broken = False

    def fails(call: Callable[..., int]) -> Callable[..., int]:
        def broken(*arguments: object) -> int:
            if is_broken:
                raise OSError(code, os.strerror(code))
            return call(*arguments)

        return broken

    def sync(fd: int) -> None:
        fails(lambda: 0)()
        os.fdatasync(fd)

    volume = make(folder, calls=FileCalls(preadv=fails(os.preadv), pwritev=fails(os.pwritev), fdatasync=sync))
    put(volume, 0, 1)
    is_broken = True
    for call in (lambda: put(volume, 1, 2), lambda: got(volume, 0, 1), volume.sync):
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == code
    is_broken = False
    volume.close()  # after a failed sync the journal is not clean: the next opening scans
    with make(folder) as volume:
        assert [slot for slot, _ in volume.recover()] == [0]


def test_a_volume_of_another_kind_is_replaced_with_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    kinds = [
        (KIND, BLOCK, CAPACITY, ""),
        (b"another model", BLOCK, CAPACITY, "belongs to another model or block layout"),
        (b"another model", BLOCK * 2, CAPACITY, "has blocks of 12288 bytes, not 24576"),
        (b"another model", BLOCK * 2, CAPACITY // 2, "slots, not"),
    ]
    for kind, block, capacity, warning in kinds:
        caplog.clear()
        with open_volume((folder,), capacity, block, kind) as volume:
            assert warning in caplog.text
            assert bool(warning) == any(record.levelno == logging.WARNING for record in caplog.records)
            assert list(volume.recover()) == []
            put(volume, 0, 1)
            assert got(volume, 0, 1) == block_of(1, block)
        assert disk_bytes(folder) <= capacity


@pytest.mark.parametrize("offset", [0, 8, 16, 30, 100, 2000, 4090])
def test_a_damaged_superblock_or_another_version_makes_a_new_volume(
    folder: Path, offset: int, caplog: pytest.LogCaptureFixture
) -> None:
    with make(folder) as volume:
        put(volume, 0, 1)
    with (folder / VOLUME_NAME).open("r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, offset)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 0x40]), offset)
    with make(folder) as volume:
        assert "kv volume replaced" in caplog.text
        assert list(volume.recover()) == []
        assert got(volume, 0, 1) is None


def test_a_scan_finds_the_same_blocks_as_the_journal(folder: Path) -> None:
    with make(folder) as volume:
        for slot in range(0, volume.slots, 3):
            put(volume, slot, slot)
    with make(folder) as volume:
        journalled = list(volume.recover())
    (folder / JOURNAL_NAME).unlink()
    with make(folder) as volume:
        assert list(volume.recover()) == [(slot, key_of(slot)) for slot in range(0, volume.slots, 3)] == journalled


def test_the_newest_copy_of_a_key_comes_last(folder: Path) -> None:
    with make(folder) as volume:
        put(volume, 2, 1)
        put(volume, 9, 1)
        put(volume, 7, 3)
        put(volume, 5, 3)
    for name in ("journal", "scan"):
        if name == "scan":
            (folder / JOURNAL_NAME).unlink()
        with make(folder) as volume:
            found = {key: slot for slot, key in volume.recover()}
            assert found == {key_of(1): 9, key_of(3): 5}


def test_recovery_in_pieces_passes_over_slots_changed_since(folder: Path) -> None:
    for is_scan in (False, True):
        with make(folder, kind=f"{is_scan}".encode()) as volume:
            for slot in range(20):
                put(volume, slot, slot)
        if is_scan:
            (folder / JOURNAL_NAME).unlink()
        with make(folder, kind=f"{is_scan}".encode()) as volume:
            recovered = volume.recover()
            assert next(recovered) == (0, key_of(0))
            put(volume, 11, 99)
            rest = dict(recovered)
            assert sorted(rest) == [*range(1, 11), *range(12, 20)]
        with make(folder, kind=f"{is_scan}".encode()) as volume:
            assert dict(volume.recover())[11] == key_of(99)


def test_folders_are_striped_and_must_come_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folders = (tmp_path / "a", tmp_path / "b", tmp_path / "c")
    with open_volume(folders, CAPACITY, BLOCK, KIND) as volume:
        assert volume.slots % 3 == 0
        for slot in range(volume.slots):
            put(volume, slot, slot)
        raw = [(folder / VOLUME_NAME).read_bytes() for folder in folders]
        for slot in range(volume.slots):
            at = ALIGN + slot // 3 * slot_bytes(BLOCK) + ALIGN
            assert raw[slot % 3][at : at + BLOCK] == block_of(slot)
        slots = volume.slots
    for is_scan in (False, True):
        if is_scan:
            (folders[0] / JOURNAL_NAME).unlink()
        with open_volume(folders, CAPACITY, BLOCK, KIND) as volume:
            assert list(volume.recover()) == [(slot, key_of(slot)) for slot in range(slots)]
            assert all(got(volume, slot, slot) == block_of(slot) for slot in range(slots))
    assert sum(map(disk_bytes, folders)) <= CAPACITY
    with open_volume((folders[1], folders[0], folders[2]), CAPACITY, BLOCK, KIND) as volume:
        assert "another set of folders" in caplog.text
        assert list(volume.recover()) == []
    with pytest.raises(ConfigError, match="same folder twice"):
        open_volume((folders[0], folders[0]), CAPACITY, BLOCK, KIND)


@pytest.mark.parametrize("block", [1, 4096, 5000, 196_608])
def test_the_limit_holds_for_every_kind_of_write(folder: Path, block: int) -> None:
    capacity = 4 << 20
    rng = random.Random(block)
    with open_volume((folder,), capacity, block, KIND) as volume:
        assert volume.total_bytes <= capacity
        assert volume.total_bytes > capacity * 0.8
        most = 0
        for turn in range(min(3 * volume.slots, 1500)):
            slot = rng.randrange(volume.slots)
            volume.write(slot, key_of(turn), memoryview(block_of(turn, min(block, 64))))
            if turn % 50 == 0:
                most = max(most, disk_bytes(folder))
        assert max(most, disk_bytes(folder)) <= capacity
    assert disk_bytes(folder) <= capacity


def test_every_capacity_is_used_as_far_as_possible() -> None:
    for capacity in range(200_000, 3_000_000, 70_001):
        for stripes in (1, 2, 5):
            layout = fit_layout(capacity, stripes, BLOCK)
            assert layout is None or (layout.total_bytes <= capacity and layout.slots % stripes == 0)


def test_bad_folders_are_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="is not a folder"):
        make(file)
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match=f"chmod 700 {shared}"):
        make(shared)
    with pytest.raises(ConfigError, match="1 to 64 folders, not 0"):
        open_volume((), CAPACITY, BLOCK, KIND)
    with pytest.raises(ConfigError, match=r"less than one block per folder needs"):
        open_volume((tmp_path / "small",), 10_000, BLOCK, KIND)
    assert not (tmp_path / "small").exists()
    with pytest.raises(ConfigError, match=r"no room for .* TiB are missing") as caught:
        open_volume((tmp_path / "large",), 1 << 50, 1 << 30, KIND)
    assert isinstance(caught.value.facts["missing_bytes"], int)
    assert [path.name for path in (tmp_path / "large").iterdir()] == []
    assert (tmp_path / "large").stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o700)
    os.chown(foreign, 12_345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345, but this process runs as user 0"):
        make(foreign)


def test_links_in_place_of_files_are_refused(tmp_path: Path, folder: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    for name in (VOLUME_NAME, LOCK_NAME):
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(victim)
        with pytest.raises(ConfigError):
            open_volume((folder,), CAPACITY, BLOCK, KIND, lock=True)
        (folder / name).unlink()
    os.link(victim, folder / VOLUME_NAME)
    with pytest.raises(ConfigError, match="not a plain file"):
        make(folder)
    (folder / VOLUME_NAME).unlink()
    (folder / JOURNAL_NAME).symlink_to(victim)  # a journal is replaced, not followed
    with make(folder) as volume:
        put(volume, 0, 1)
    os.mkfifo(folder / "pipe")
    (folder / JOURNAL_NAME).unlink()
    (folder / "pipe").rename(folder / JOURNAL_NAME)
    with make(folder) as volume:
        assert list(volume.recover()) == [(0, key_of(1))]
    assert victim.read_bytes() == b"precious"


def test_a_refused_allocation_leaves_nothing_behind(folder: Path) -> None:
    def full(fd: int, at: int, count: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with pytest.raises(ConfigError, match="quota"):
        make(folder, calls=FileCalls(fallocate=full))
    assert list(folder.iterdir()) == []


def test_the_error_on_a_small_tmpfs_names_the_missing_bytes(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this user cannot mount a tmpfs")
    try:
        with pytest.raises(ConfigError, match=r"no room for 3\.\d MiB in .*: 1\.\d MiB are missing"):
            open_volume((tmp_path / "kv",), 4 << 20, BLOCK, KIND)
        with open_volume((tmp_path / "kv",), 1 << 20, BLOCK, KIND) as volume:
            for slot in range(volume.slots):
                put(volume, slot, slot)
            filler = tmp_path / "filler"
            with pytest.raises(OSError, match="No space"), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            for slot in range(volume.slots):  # a full disk does not matter: the files are allocated
                put(volume, slot, slot + 1)
            assert got(volume, 0, 1) == block_of(1)
        with open_volume((tmp_path / "kv",), 1 << 20, BLOCK, KIND) as volume:
            assert len(dict(volume.recover())) == volume.slots
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_the_error_of_a_second_daemon_names_the_pid_of_the_first(folder: Path) -> None:
    hold = (
        "import sys, pathlib; from tiercel.device.volume import open_volume;"
        f"volume = open_volume((pathlib.Path({str(folder)!r}),), {CAPACITY}, {BLOCK}, {KIND!r}, lock=True);"
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=os.getcwd()
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        assert lock_holder(folder) == first.pid
        with pytest.raises(ConfigError, match=f"in use by the daemon with pid {first.pid}"):
            open_volume((folder,), CAPACITY, BLOCK, KIND, lock=True)
        first.communicate()
    assert lock_holder(folder) is None
    open_volume((folder,), CAPACITY, BLOCK, KIND, lock=True).close()
    assert lock_holder(folder) is None


def test_an_inherited_lock_outlives_the_process_that_took_it(folder: Path) -> None:
    lock = lock_folder(folder)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(lock,)) as child:
        os.close(lock)
        assert lock_holder(folder) == os.getpid()
        with pytest.raises(ConfigError, match="in use"):
            lock_folder(folder)
        child.communicate()
    os.close(lock_folder(folder))


def test_the_volume_does_not_import_torch() -> None:
    code = (
        "import sys, tiercel.device.volume, tiercel.device.volume_survey; "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
