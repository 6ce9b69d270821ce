"""Open and lock a folder of the SSD tier."""

import contextlib
import fcntl
import os
import stat
import time
from pathlib import Path

from tiercel.values.errors import ConfigError

LOCK_NAME = "tiercel-kv.lock"

_LOCK_TRIES = 3  # `tiercel kv` holds a shared lock for a moment while it looks up the daemon that uses the folder
_LOCK_PAUSE_S = 0.05
_PID_DIGITS = 20


def open_folder(folder: Path, *, may_create: bool) -> int:
    """Open a folder that only this user may access, and return its descriptor.

    With `may_create` a missing folder is created with mode 0700. Errors: ConfigError.
    """
    try:
        if may_create:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        found = os.fstat(fd)
    except (FileExistsError, NotADirectoryError) as exc:
        raise ConfigError("kv.no_folder", f"{folder} is not a folder") from exc
    except OSError as exc:
        raise ConfigError("kv.no_folder", f"cannot use the folder {folder}: {exc.strerror}") from exc
    wrong = ""
    if found.st_uid != os.geteuid():
        wrong = f"{folder} belongs to user {found.st_uid}, but this process runs as user {os.geteuid()}"
    elif stat.S_IMODE(found.st_mode) & 0o077:
        wrong = f"{folder} can be read or written by other users; run: chmod 700 {folder}"
    if wrong:
        os.close(fd)
        raise ConfigError("kv.open_folder", wrong)
    return fd


def lock_folder(folder: Path) -> int:
    """Lock a folder for this daemon, and return the descriptor that holds the lock.

    The lock is released when the descriptor and every copy that a child process inherited (`os.set_inheritable`) are
    closed. Errors: ConfigError, with the pid of the other daemon if the folder is locked.
    """
    handle = open_folder(folder, may_create=True)
    try:
        fd = _open_lock(folder, handle, os.O_RDWR | os.O_CREAT)
    finally:
        os.close(handle)
    try:
        _take_lock(folder, fd)
    except OSError as exc:
        os.close(fd)
        raise ConfigError("kv.lock", f"cannot lock {folder / LOCK_NAME}: {exc.strerror}") from exc
    except ConfigError:
        os.close(fd)
        raise
    return fd


def holds_lock(folder: Path) -> bool:
    """Return whether this process has the lock of a folder, as an engine has that of its daemon.

    A folder that was replaced since it was locked has another lock file: then the answer is False.
    """
    with contextlib.suppress(OSError):
        wanted = os.stat(folder / LOCK_NAME, follow_symlinks=False)
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed by now
                found = os.fstat(fd)
                if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return True
    return False


def lock_holder(folder: Path) -> int | None:
    """Return the pid of the daemon that uses the folder, 0 if the pid is unknown, or None if no daemon uses it.

    Errors: ConfigError if the folder or its lock file cannot be opened.
    """
    handle = open_folder(folder, may_create=False)
    try:
        if LOCK_NAME not in os.listdir(handle):
            return None
        fd = _open_lock(folder, handle, os.O_RDONLY)
    finally:
        os.close(handle)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_pid(fd) or 0
    finally:
        os.close(fd)
    return None


def _take_lock(folder: Path, fd: int) -> None:
    """Lock the open lock file, and write the pid into it. Errors: ConfigError if another process has it; OSError."""
    for left in reversed(range(_LOCK_TRIES)):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            if left:
                time.sleep(_LOCK_PAUSE_S)
                continue
            holder = _read_pid(fd)
            who = "another daemon" if holder is None else f"the daemon with pid {holder}"
            raise ConfigError("kv.locked", f"{folder} is in use by {who}", pid=holder) from exc
        break
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)


def _open_lock(folder: Path, handle: int, flags: int) -> int:
    try:
        fd = os.open(LOCK_NAME, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600, dir_fd=handle)
    except OSError as exc:
        raise ConfigError("kv.lock", f"cannot open {folder / LOCK_NAME}: {exc.strerror}") from exc
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ConfigError("kv.lock", f"{folder / LOCK_NAME} is not a plain file")
    return fd


def _read_pid(fd: int) -> int | None:
    text = os.pread(fd, _PID_DIGITS, 0).strip()
    return int(text) if text.isdigit() else None
