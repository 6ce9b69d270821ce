"""Counters that several processes share: each number is given out once, in order."""

import fcntl
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

_NUMBER = struct.Struct("<Q")


class SharedCounters:
    """Counters in a file. Use with `with`. Taking a number costs a few microseconds."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = -1

    def __enter__(self) -> Self:
        self._file = os.open(self._path, os.O_RDWR)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def take(self, counter: int) -> int:
        """Return the next number of a counter, starting with 0."""
        offset = counter * _NUMBER.size
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            held = os.pread(self._file, _NUMBER.size, offset)
            number = _NUMBER.unpack(held)[0] if len(held) == _NUMBER.size else 0
            os.pwrite(self._file, _NUMBER.pack(number + 1), offset)
            return number
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)


@contextmanager
def counter_file() -> Iterator[str]:
    """Yield the path of a new counter file, which is deleted afterwards."""
    with tempfile.NamedTemporaryFile(prefix="tiercel-bench-") as file:
        yield file.name
