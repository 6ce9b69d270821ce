"""One failing system call in the life of a volume: the first, the second, ... until a life passes without it.

A life opens a volume, writes, syncs, reads, closes, opens again and reads everything. Whatever call fails, by an error
or silently, every block that is read is the one that was written, or a miss.
"""

import errno
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tiercel.device.volume import Volume, open_volume
from tiercel.device.volume_file import FileCalls
from tiercel.values.errors import ConfigError

BLOCK, CAPACITY, KIND = 12_288, 1 << 19, b"model and layout"
BLOCKS = 6
MOST_CALLS = 200  # more than a life makes


def key_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def block_of(number: int) -> bytes:
    return hashlib.shake_128(key_of(number)).digest(BLOCK)


@dataclass
class FailingCalls:
    """The system calls of a volume, of which the n-th of one kind goes wrong in one way."""

    kind: str
    way: str
    left: int
    has_failed: bool = field(default=False)

    def calls(self) -> FileCalls:
        return FileCalls(preadv=self._preadv, pwritev=self._pwritev, fdatasync=self._sync, fallocate=self._allocate)

    def _is_due(self, kind: str) -> bool:
        if kind != self.kind:
            return False
        self.left -= 1
        if self.left:
            return False
        self.has_failed = True
        if self.way in ("EIO", "ENOSPC"):
            code = getattr(errno, self.way)
            raise OSError(code, os.strerror(code))
        return True

    def _preadv(self, fd: int, parts: Sequence[memoryview], at: int) -> int:
        is_due = self._is_due("read")
        count = os.preadv(fd, parts, at)
        if is_due and self.way == "short":
            return count // 2
        if is_due and self.way == "torn":
            parts[-1][len(parts[-1]) // 2 :] = bytes(len(parts[-1]) - len(parts[-1]) // 2)
        if is_due and self.way == "flip":
            parts[-1][len(parts[-1]) // 3] ^= 0x04
        return count

    def _pwritev(self, fd: int, parts: Sequence[memoryview], at: int) -> int:
        if not self._is_due("write"):
            return os.pwritev(fd, parts, at)
        whole = b"".join(parts)
        if self.way == "flip":
            changed = bytearray(whole)
            changed[len(whole) // 3] ^= 0x04
            self._write(fd, bytes(changed), at)
            return len(whole)
        half = whole[: len(whole) // 2 // 512 * 512]
        self._write(fd, half, at)
        return len(half) if self.way == "short" else len(whole)

    @staticmethod
    def _write(fd: int, text: bytes, at: int) -> None:
        """Write through another descriptor: direct I/O would want aligned memory."""
        other = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
        try:
            os.pwrite(other, text, at)
            os.fsync(other)
        finally:
            os.close(other)

    def _sync(self, fd: int) -> None:
        self._is_due("sync")
        os.fdatasync(fd)

    def _allocate(self, fd: int, at: int, length: int) -> None:
        self._is_due("allocate")
        os.posix_fallocate(fd, at, length)


def live(folder: Path, calls: FileCalls) -> None:
    """Open, write, sync, read, close, open again, read. Every read gives the right block or none."""
    for turn in range(2):
        try:
            volume = open_volume((folder,), CAPACITY, BLOCK, KIND, calls=calls)
        except ConfigError:
            continue
        with volume:
            found = dict(volume.recover())
            for slot, key in found.items():
                check(volume, slot, key)
            for number in range(turn * 3, BLOCKS):
                try:
                    volume.write(number, key_of(number), memoryview(block_of(number)))
                    volume.sync()
                except OSError:
                    break
            for number in range(BLOCKS):
                check(volume, number, key_of(number))


def check(volume: Volume, slot: int, key: bytes) -> bool:
    """Return whether a block was read. Errors: AssertionError for a wrong one."""
    into = memoryview(bytearray(BLOCK))
    try:
        is_found = volume.read(slot, key, into)
    except OSError:
        return False
    expected = {key_of(number): block_of(number) for number in range(BLOCKS)}
    assert not is_found or expected[key] == bytes(into), f"a wrong block in slot {slot}"
    return is_found


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *(("read", way) for way in ("EIO", "short", "torn", "flip")),
        *(("write", way) for way in ("EIO", "ENOSPC", "short", "torn", "flip")),
        ("sync", "EIO"),
        *(("allocate", way) for way in ("EIO", "ENOSPC")),
    ],
)
@pytest.mark.sampled(4)
def test_no_failing_call_in_the_life_of_a_volume_gives_a_wrong_block(tmp_path: Path, kind: str, way: str) -> None:
    for number in range(1, MOST_CALLS):
        folder = tmp_path / f"kv{number}"
        failing = FailingCalls(kind, way, number)
        live(folder, failing.calls())
        with open_volume((folder,), CAPACITY, BLOCK, KIND) as volume:  # a life without faults after it
            for slot, key in volume.recover():
                check(volume, slot, key)
            for slot in range(BLOCKS):
                volume.write(slot, key_of(slot), memoryview(block_of(slot)))
                assert check(volume, slot, key_of(slot))
        if not failing.has_failed:
            assert number > 1, f"no {kind} was made"
            return
    raise AssertionError(f"a life makes more than {MOST_CALLS} calls")
