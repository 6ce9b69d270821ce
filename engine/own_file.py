"""Small files that the engine keeps for its next start: read only where they are this user's, replaced at once."""

import contextlib
import os
import stat
import tempfile
from pathlib import Path

_MOST_BYTES = 1 << 20


def read_own(path: Path) -> bytes:
    """The bytes of a plain file of this user, 1 MiB at most. Errors: OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise OSError("no plain file of this user")
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise OSError("too long")
    return content


def replace_own(path: Path, content: bytes) -> None:
    """Put a file of these bytes in place, readable by its owner only; its folder is made. Errors: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd, draft = tempfile.mkstemp(prefix=f".{path.stem}-", dir=path.parent)  # 0600
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
