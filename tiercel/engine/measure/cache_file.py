"""The files in which the engine keeps measurements for its next start: one for each kind, model and machine."""

import contextlib
import logging
import os
import stat
import tempfile
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from tiercel.values.facts import Facts, identity_of_facts
from tiercel.wire.encoding import plain_value

log = logging.getLogger(__name__)

_MAX_BYTES = 1 << 20


class Content(Protocol):
    """A msgspec structure that says which measurements it holds."""

    @property
    def identity(self) -> str:
        """SHA-256 of everything that the measurements depend on, in hexadecimal."""
        ...


T = TypeVar("T", bound=Content)


class CacheFile(Generic[T]):
    """A JSON file of measurements. A file that is missing, damaged or of another identity counts as empty."""

    def __init__(self, folder: str | None, kind: str, facts: Facts, content: type[T]) -> None:
        """`facts` name everything that the measurements depend on. Without a folder nothing is kept."""
        self.identity = identity_of_facts(facts).hex()
        self.path = None if folder is None else Path(folder) / f"{kind}-{self.identity[:24]}.json"
        self._kind = kind
        self._content = content

    def read(self) -> T | None:
        """Return the content, None if there is none that can be used; the reason is logged as a warning."""
        if self.path is None:
            return None
        try:
            content = msgspec.json.decode(_read_own(self.path), type=self._content)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as exc:
            log.warning("measurements not read kind=%s path=%s error=%s", self._kind, self.path, exc.strerror or exc)
            return None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            log.warning("measurements not used kind=%s path=%s error=%s", self._kind, self.path, exc)
            return None
        if content.identity != self.identity:
            log.warning(
                "measurements not used kind=%s path=%s error=of another model or machine", self._kind, self.path
            )
            return None
        return content

    def write(self, content: T) -> None:
        """Replace the file atomically; it is readable by its owner only, and its folder is made. Errors: OSError."""
        if self.path is not None:
            _replace(self.path, msgspec.json.encode(content, enc_hook=plain_value))


def _read_own(path: Path) -> bytes:
    """Return the bytes of a regular file of this user, at most 1 MiB. Errors: OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise OSError("not a regular file of this user")
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise OSError(f"longer than {_MAX_BYTES} bytes")
    return content


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd, draft = tempfile.mkstemp(prefix=f".{path.stem}-", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
