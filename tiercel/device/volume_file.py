"""The volume file of one folder, with direct I/O where the file system supports it, and aligned buffers."""

import ctypes
import errno
import logging
import mmap
import os
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiercel.device.volume_format import ALIGN, VOLUME_NAME, round_up
from tiercel.values.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FileCalls:
    """The system calls that read and write blocks. Tests replace them with failing calls."""

    preadv: Callable[[int, Sequence[memoryview], int], int] = os.preadv
    pwritev: Callable[[int, Sequence[memoryview], int], int] = os.pwritev
    fdatasync: Callable[[int], None] = os.fdatasync
    fallocate: Callable[[int, int, int], None] = os.posix_fallocate


class ThreadBuffers(threading.local):
    """Aligned buffers of the calling thread: one for a header, one for a payload that cannot be used in place."""

    def __init__(self, payload_bytes: int) -> None:
        self._payload_bytes = payload_bytes
        self._payload: memoryview | None = None
        self.header = memoryview(mmap.mmap(-1, ALIGN))

    @property
    def payload(self) -> memoryview:
        """The buffer for one payload, rounded up to `ALIGN`."""
        if self._payload is None:
            self._payload = memoryview(mmap.mmap(-1, round_up(self._payload_bytes)))
        return self._payload


def is_aligned(view: memoryview) -> bool:
    """Return whether direct I/O can use these bytes in place.

    Return False for read-only memory, because Python does not provide its address.
    """
    if view.readonly or view.nbytes % ALIGN:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % ALIGN == 0


class VolumeFile:
    """The volume file of one folder. Positions are in bytes; every method may be called from any thread."""

    def __init__(self, path: Path, fd: int, calls: FileCalls, *, is_direct: bool) -> None:
        self.path = path
        self.fd = fd
        self.is_direct = is_direct
        self._calls = calls

    def read(self, parts: Sequence[memoryview], at: int) -> int:
        """Read into the parts in order, and return the number of bytes read. Errors: OSError."""
        count = self._calls.preadv(self.fd, parts, at)
        if not self.is_direct:
            os.posix_fadvise(self.fd, at, count, os.POSIX_FADV_DONTNEED)
        return count

    def write(self, parts: Sequence[memoryview], at: int) -> None:
        """Write the parts one after the other. Errors: OSError; EIO after a short write."""
        wanted = sum(part.nbytes for part in parts)
        if self._calls.pwritev(self.fd, parts, at) != wanted:
            raise OSError(errno.EIO, "short write", str(self.path))

    def sync(self) -> None:
        """Make all writes durable. Errors: OSError, after which the state of earlier writes is unknown."""
        self._calls.fdatasync(self.fd)
        self.check_name()
        if not self.is_direct:
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def check_name(self) -> None:
        """Check that the file still has a name. Errors: OSError.

        A file that was deleted takes writes and syncs, but nobody finds its blocks again, and its space is lost until
        the process ends: that is ENOENT.
        Cost: one fstat, a microsecond.
        """
        if os.fstat(self.fd).st_nlink == 0:
            raise OSError(errno.ENOENT, "the file was deleted while it was in use", str(self.path))

    def close(self) -> None:
        """Close the descriptor. No other call may be in progress."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def open_volume_file(folder: int, path: Path, calls: FileCalls, *, may_write: bool = True) -> VolumeFile | None:
    """Open the volume file of an open folder. Return None if the folder has none.

    Errors: ConfigError if the file is not a plain file of this user; OSError.
    """
    if VOLUME_NAME not in os.listdir(folder):
        return None
    flags = (os.O_RDWR if may_write else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(VOLUME_NAME, flags, dir_fd=folder)
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise ConfigError("kv.volume", f"{path} is a symbolic link; remove it") from exc
        raise
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_uid != os.geteuid():
        os.close(fd)
        raise ConfigError("kv.volume", f"{path} is not a plain file of this user's own; remove it")
    return _with_direct_io(path, fd, folder, flags, calls)


def create_volume_file(folder: int, path: Path, file_bytes: int, calls: FileCalls) -> VolumeFile:
    """Create a fully allocated volume file, and delete an existing one. Errors: OSError."""
    if VOLUME_NAME in os.listdir(folder):
        os.unlink(VOLUME_NAME, dir_fd=folder)
    found = os.fstatvfs(folder)
    if file_bytes > found.f_bavail * found.f_frsize:  # checked first: a failing allocation may fill the disk meanwhile
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(VOLUME_NAME, flags, 0o600, dir_fd=folder)
    try:
        calls.fallocate(fd, 0, file_bytes)
    except OSError:
        os.close(fd)
        os.unlink(VOLUME_NAME, dir_fd=folder)
        raise
    return _with_direct_io(path, fd, folder, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, calls)


def _with_direct_io(path: Path, fd: int, folder: int, flags: int, calls: FileCalls) -> VolumeFile:
    """Return the file with direct I/O if a test read at the superblock succeeds, otherwise without."""
    probe = memoryview(mmap.mmap(-1, ALIGN))
    direct = -1
    try:
        direct = os.open(VOLUME_NAME, flags | os.O_DIRECT, dir_fd=folder)
        calls.preadv(direct, [probe], 0)
    except OSError as exc:
        if direct >= 0:
            os.close(direct)
        log.info("kv volume without direct I/O path=%s reason=%s", path, exc.strerror)
        return VolumeFile(path, fd, calls, is_direct=False)
    os.close(fd)
    return VolumeFile(path, direct, calls, is_direct=True)
