"""The limits of this process that the kernel enforces on memory and files (getrlimit(2)), in words for people."""

import errno
import resource
from dataclasses import dataclass
from pathlib import Path

from tiercel.values.units import show_bytes

_PAGE_BYTES = resource.getpagesize()
_MEMORY = (  # limit, its subject, how to raise it, the column of /proc/self/statm that counts its use
    (resource.RLIMIT_AS, "address space", "RLIMIT_AS: ulimit -v, LimitAS of systemd", 0),
    (resource.RLIMIT_DATA, "private memory", "RLIMIT_DATA: ulimit -d, LimitDATA of systemd", 5),
)
_FILE_WORDS = "the size of files, also of those in memory (RLIMIT_FSIZE: ulimit -f, LimitFSIZE of systemd)"


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit on the memory of this process that is in force. `limit_bytes` includes what the process uses already."""

    words: str
    limit_bytes: int
    used_bytes: int

    @property
    def left_bytes(self) -> int:
        """The bytes that this process may still allocate."""
        return max(0, self.limit_bytes - self.used_bytes)

    def __str__(self) -> str:
        return f"the limit of {show_bytes(self.limit_bytes)} on {self.words}"


def memory_limits(proc: Path = Path("/proc")) -> list[MemoryLimit]:
    """Return the limits on memory that are in force."""
    found: list[MemoryLimit] = []
    for number, subject, how, column in _MEMORY:
        soft = resource.getrlimit(number)[0]
        if soft != resource.RLIM_INFINITY:
            used = int((proc / "self" / "statm").read_text().split()[column]) * _PAGE_BYTES
            found.append(MemoryLimit(f"{subject} ({how})", soft, used))
    return found


def file_limit_bytes() -> int | None:
    """Return the maximum size of a file that this process writes, memfds included; None: any."""
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def show_file_limit() -> str:
    """Return the limit on the size of files in words; empty if there is none."""
    size = file_limit_bytes()
    return "" if size is None else f"the limit of {show_bytes(size)} on {_FILE_WORDS}"


def show_memory_limits() -> str:
    """Return the limits on memory that are in force in words; empty if there are none."""
    return " and ".join(map(str, memory_limits()))


def blame(error: BaseException) -> str:
    """Return an error in words, with the limit of this process that may have caused it."""
    number = error.errno if isinstance(error, OSError) else None
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    if number == errno.EFBIG:
        limit = show_file_limit()
    elif number in (None, errno.ENOMEM, errno.EAGAIN):
        limit = show_memory_limits()
    else:
        limit = ""
    return f"{text}; raise {limit}" if limit else text


def lower_limit(number: int, limit: int) -> None:
    """Lower both values of a limit. A limit is never raised, which the kernel would refuse."""
    hard = resource.getrlimit(number)[1]
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(number, (limit, limit))
