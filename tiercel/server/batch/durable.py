"""Writes that survive a crash of the process and of the machine, and folders that only their owner can read."""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

S = TypeVar("S", bound=Struct)

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_CREATION_STEP_S = 1e-5  # a float holds today's Unix time to better than this
_FOLDER_MODE = 0o700  # the files are prompts and answers of tenants
_FILE_MODE = 0o600


def make_folder(path: Path) -> None:
    """Make a folder that only its owner can read, if it does not exist. Errors: OSError."""
    path.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)


def create_file(path: Path) -> int:
    """Create a file that only its owner can read, and return its descriptor. Errors: OSError."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)


def open_file(path: Path) -> int:
    """Open or create a file for reading and writing, and return its descriptor. Errors: OSError."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)


def write_all(fd: int, data: bytes | bytearray, offset: int) -> None:
    """Write bytes at an offset. Errors: OSError; then some of the bytes may have been written."""
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def sync_folder(folder: Path) -> None:
    """Make renamed, created and removed names of a folder durable. Errors: OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_document(path: Path, document: Struct) -> None:
    """Replace a file by a JSON document, durably: after a crash it is the old or the new document. Errors: OSError."""
    draft = path.with_name(f".{path.name}.new")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, _FILE_MODE)
    try:
        write_all(fd, msgspec.json.encode(document), 0)
        os.fsync(fd)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    draft.replace(path)
    sync_folder(path.parent)


def read_document(path: Path, kind: type[S]) -> S | None:
    """Return the document in a file; None if it is damaged. Errors: OSError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class CreationClock:
    """Unix times of creation, each later than the one before, so that an order by them is the order of creation."""

    def __init__(self, wall_s: Callable[[], float]) -> None:
        self._wall_s = wall_s
        self._newest_s = 0.0

    def note(self, created_s: float) -> None:
        """Take over a time that was given before a restart."""
        self._newest_s = max(self._newest_s, created_s)

    def next_s(self) -> float:
        """Return the time of something that is created now."""
        self._newest_s = max(self._wall_s(), self._newest_s + _CREATION_STEP_S)
        return self._newest_s


class FolderLock:
    """The right of one process to write to a folder. The kernel releases it if the process dies."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lock"
        self._fd: int | None = None

    def try_lock(self) -> bool:
        """Return whether this process has the folder now. Errors: OSError."""
        fd = open_file(self._path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self._fd = fd
        return True

    def release(self) -> None:
        """Give the folder to another process."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
