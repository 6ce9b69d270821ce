"""A file of packed experts on an SSD: records that are written once at the start, and read with direct I/O."""

import contextlib
import errno
import logging
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from tiercel.device.time_limit import within
from tiercel.device.volume_file import FileCalls
from tiercel.device.volume_format import ALIGN, digest_of, round_up
from tiercel.engine.experts.slots import ExpertSlots
from tiercel.engine.native.huge_pages import WeightMemory
from tiercel.values.errors import ConfigError, DeviceLostError
from tiercel.values.units import show_bytes

log = logging.getLogger(__name__)

DISK_ERRORS = frozenset({"experts.no_folder", "experts.not_written", "experts.not_read"})  # of the folder and its disk

T = TypeVar("T")

_READS = 2  # tries of a record: a damaged transfer is not a damaged disk


@dataclass(frozen=True, slots=True)
class ExpertRecord:
    """The place of an expert in the file."""

    at: int  # bytes from the beginning, a multiple of 4096
    length: int  # bytes, without the padding to a multiple of 4096
    digest: bytes  # xxh3-128 of the bytes


class ExpertFile:
    """The packed experts of a model, in a file without a name that vanishes with the process.

    Records are appended by one thread, and read by any thread.
    """

    def __init__(
        self, folder: Path, fd: int, calls: FileCalls, *, is_direct: bool, limit_s: float | None = None
    ) -> None:
        """See `create`."""
        self.folder = folder
        self._limit_s = limit_s
        self._hangs = False  # a call has not returned
        self.is_direct = is_direct
        self.records: list[ExpertRecord] = []
        self._fd = fd
        self._calls = calls
        self._end = 0

    @classmethod
    def create(cls, folder: Path, calls: FileCalls | None = None, limit_s: float | None = None) -> "ExpertFile":
        """Create an empty file in a folder, which is made if it is missing.

        `limit_s`: the time of one call to the disk until the file is complete, after which the disk hangs; then all
        records are read back, too. Give it where there is something to do without the file: an engine that starts
        again because it could not read an expert must find that out before it serves. None: no limit, and only the
        first record is read back.
        Errors: ConfigError naming the folder.
        """
        used = calls or FileCalls()
        try:
            fd, direct = _create(folder, used) if limit_s is None else within(limit_s, lambda: _create(folder, used))
        except OSError as exc:
            raise ConfigError(
                "experts.no_folder", f"--expert-memory: cannot write to the folder {folder}: {exc.strerror}"
            ) from exc
        if direct is None:
            log.info("experts without direct I/O folder=%s", folder)
            return cls(folder, fd, used, is_direct=False, limit_s=limit_s)
        os.close(fd)
        return cls(folder, direct, used, is_direct=True, limit_s=limit_s)

    @property
    def record_bytes(self) -> int:
        """The memory that the largest record takes, a multiple of 4096; 0 without records."""
        return max((round_up(record.length) for record in self.records), default=0)

    @property
    def num_records(self) -> int:
        """See `ExpertStore.num_records`."""
        return len(self.records)

    @property
    def stored_bytes(self) -> int:
        """See `ExpertStore.stored_bytes`."""
        return self._end

    def append(self, parts: Sequence[Tensor]) -> int:
        """See `ExpertStore.append`.

        The first record is read back, or all are (see `create`): a disk that takes bytes and returns none would end
        one engine after the other.
        Cost:   the record is copied once.
        Errors: ConfigError naming the folder, if the disk is full or fails.
        """
        length = sum(part.nbytes for part in parts)
        buffer = memoryview(mmap.mmap(-1, max(ALIGN, round_up(length))))
        start = 0
        for part in parts:
            buffer[start : start + part.nbytes] = part.numpy().data
            start += part.nbytes
        try:
            if self._in_time(lambda: self._calls.pwritev(self._fd, [buffer], self._end)) != buffer.nbytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as exc:
            shown = f"--expert-memory: cannot write the experts to {self.folder} after {show_bytes(self._end)}"
            raise ConfigError("experts.not_written", f"{shown}: {exc.strerror}") from exc
        self.records.append(ExpertRecord(self._end, length, digest_of(buffer[:length])))
        self._end += buffer.nbytes
        number = len(self.records) - 1
        is_checked = number == 0 or self._limit_s is not None
        if is_checked and (reason := self._read_back(number, buffer)):
            shown = f"--expert-memory: cannot read the experts from {self.folder}"
            raise ConfigError("experts.not_read", f"{shown}: {reason}")
        return number

    def read(self, number: int, into: memoryview) -> None:
        """Read a record, and check all its bytes. `into`: at least `record_bytes`, aligned to 4096 bytes.

        Errors: DeviceLostError if the disk fails or returns other bytes, twice. The file cannot be repaired, but the
                next start of the engine writes it again.
        """
        if reason := self._read(number, into):
            shown = f"an expert cannot be read from the SSD folder {self.folder}: {reason}"
            raise DeviceLostError("experts.unreadable", shown, record=number)

    def open_slots(self, count: int) -> ExpertSlots:
        """See `ExpertStore.open_slots`. The memory takes its pages now."""
        return _FileSlots(self, count)

    def _read(self, number: int, into: memoryview) -> str:
        """Read a record. Return why that failed twice, or an empty text."""
        record = self.records[number]
        room = into[: round_up(record.length)]
        reason = ""
        for _ in range(_READS):
            try:
                count = self._calls.preadv(self._fd, [room], record.at)
            except OSError as exc:
                reason = exc.strerror or str(exc)
                continue
            if not self.is_direct:
                os.posix_fadvise(self._fd, record.at, room.nbytes, os.POSIX_FADV_DONTNEED)
            if count == room.nbytes and digest_of(room[: record.length]) == record.digest:
                return ""
            reason = "other bytes than were written" if count == room.nbytes else f"{count} of {room.nbytes} bytes"
        return reason

    def _read_back(self, number: int, into: memoryview) -> str:
        """Read a record from the disk itself. Return why that failed, or an empty text."""

        def work() -> str:
            if not self.is_direct:  # else the page cache would answer
                self._calls.fdatasync(self._fd)
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
            return self._read(number, into)

        try:
            return self._in_time(work)
        except OSError as exc:
            return exc.strerror or str(exc)

    def _in_time(self, work: Callable[[], T]) -> T:
        """Do work on the disk within the limit. Errors: OSError, also after the limit: then the file stays open."""
        try:
            return work() if self._limit_s is None else within(self._limit_s, work)
        except TimeoutError:
            self._hangs = True
            raise

    def close(self) -> None:
        """Close the file, which frees its place on the disk. No other call may be in progress.

        A file with a call that hangs is closed by the end of the process.
        """
        if self._fd >= 0 and not self._hangs:
            os.close(self._fd)
            self._fd = -1


class _FileSlots:
    """Slots in the memory of a CPU."""

    def __init__(self, file: ExpertFile, count: int) -> None:
        self.num_slots, self.slot_bytes, self.num_records = count, file.record_bytes, file.num_records
        self.memory = WeightMemory().take(count * self.slot_bytes)  # aligned, because it is the first of its chunk
        self.memory.zero_()
        self._view = self.memory.numpy().data
        self._file = file

    def fetch(self, record: int, slot: int) -> int:
        """See `ExpertSlots.fetch`."""
        start = slot * self.slot_bytes
        self._file.read(record, self._view[start : start + self.slot_bytes])
        return self._file.records[record].length

    def release(self, slots: Sequence[int]) -> None:
        """Do nothing: what a CPU was given is computed."""


def _create(folder: Path, calls: FileCalls) -> tuple[int, int | None]:
    """Return a descriptor of a new file without a name, and one for direct I/O or None. Errors: OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = _create_nameless(folder)
    return fd, _open_direct(fd, calls)


def _create_nameless(folder: Path) -> int:
    with contextlib.suppress(OSError):  # a file system without nameless files
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fd, path = tempfile.mkstemp(prefix="tiercel-experts-", dir=folder)
    os.unlink(path)
    return fd


def _open_direct(fd: int, calls: FileCalls) -> int | None:
    """Return another descriptor of the file for direct I/O; None if the file system has none."""
    probe = memoryview(mmap.mmap(-1, ALIGN))
    direct = -1
    try:
        direct = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        calls.preadv(direct, [probe], 0)
    except OSError:
        if direct >= 0:
            os.close(direct)
        return None
    return direct
