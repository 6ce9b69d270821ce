"""The reasons for which a file or a folder cannot be read, in the words of the system."""

import errno
import fnmatch
import os
import stat
from pathlib import Path

from tiercel.values.errors import ConfigError


def is_there(path: Path) -> bool:
    """Return whether there is something at a path, readable or not; False if it or its folder is missing.

    Errors: ConfigError if that cannot be told: a folder that may not be entered, a loop of links, a name too long.
    `Path.is_file` would call some of these missing.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as exc:
        raise ConfigError("file.unreadable", f"{path}: {exc.strerror}") from exc
    return True


def list_folder(folder: Path, pattern: str = "*") -> list[Path]:
    """Return the paths in a folder whose names match a pattern, in order; names that begin with a dot, too.

    Errors: OSError if the folder is missing or cannot be listed. `Path.glob` would call such a folder empty.
    """
    return [folder / name for name in sorted(os.listdir(folder)) if fnmatch.fnmatchcase(name, pattern)]


def file_fault(path: str | Path) -> str | None:
    """Return why a file cannot be read; None if it can be."""
    return _fault(path, os.O_RDONLY | os.O_NONBLOCK, "file")


def folder_fault(path: str | Path) -> str | None:
    """Return why a folder cannot be read; None if it can be."""
    return _fault(path, os.O_RDONLY | os.O_DIRECTORY, "folder")


def check_file(path: Path) -> None:
    """Check that a file can be read. Errors: ConfigError that names the file and the reason."""
    if (fault := file_fault(path)) is not None:
        raise ConfigError("file.unreadable", f"{path}: {fault}")


def _fault(path: str | Path, flags: int, kind: str) -> str | None:
    try:
        fd = os.open(path, flags | os.O_CLOEXEC)
    except FileNotFoundError:
        return f"there is no such {kind}"
    except OSError as exc:
        return f"cannot be read: {exc.strerror}"
    except ValueError as exc:  # a null character
        return f"cannot be read: {exc}"
    try:
        is_folder = stat.S_ISDIR(os.fstat(fd).st_mode)
    finally:
        os.close(fd)
    return f"cannot be read: {os.strerror(errno.EISDIR)}" if is_folder and kind == "file" else None
