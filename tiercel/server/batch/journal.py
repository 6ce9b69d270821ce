"""The answers of a batch on disk: lines that are appended, and found again after a crash."""

import os
from pathlib import Path

from tiercel.server.batch.durable import open_file, write_all
from tiercel.server.batch.line import read_answered_id
from tiercel.values.clock import Clock

_SYNC_S = 1.0  # at most so often while answers arrive
_PIECE_BYTES = 1024 * 1024


class AnswerJournal:
    """One file of answers. All calls wait for the disk: they are made in a thread, one at a time."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path = path
        self.answered: dict[str, None] = {}  # custom ids of the lines that `open` has found
        self._clock = clock
        self._fd: int | None = None
        self._bytes = 0
        self._synced_s = clock.now_s()

    @property
    def size_bytes(self) -> int:
        """The bytes of all whole lines."""
        return self._bytes

    def open(self) -> None:
        """Open the file and read the answers in it; a torn or damaged line and all behind it are cut off.

        Errors: OSError.
        """
        fd = self._fd = open_file(self.path)
        rest, offset = b"", 0
        while piece := os.pread(fd, _PIECE_BYTES, offset):
            offset += len(piece)
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                custom_id = read_answered_id(line)
                if custom_id is None:
                    os.ftruncate(fd, self._bytes)
                    return
                self.answered[custom_id] = None
                self._bytes += len(line) + 1
        if rest:
            os.ftruncate(fd, self._bytes)

    def reopen(self) -> None:
        """Read the answers again, those that were added since included. Errors: OSError."""
        self.close()
        self.answered, self._bytes = {}, 0
        self.open()

    def append(self, line: bytes) -> None:
        """Add a line, or several, whole or not at all. Errors: OSError."""
        assert self._fd is not None
        try:
            write_all(self._fd, line, self._bytes)
        except OSError:
            os.ftruncate(self._fd, self._bytes)
            raise
        self._bytes += len(line)
        now_s = self._clock.now_s()
        if now_s - self._synced_s >= _SYNC_S:
            self._synced_s = now_s
            os.fdatasync(self._fd)

    def close(self) -> None:
        """Make all lines durable and close the file. Errors: OSError; the file is closed nevertheless."""
        fd, self._fd = self._fd, None
        if fd is not None:
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def remove(self) -> None:
        """Remove the file, if it exists. Errors: OSError."""
        self.path.unlink(missing_ok=True)
