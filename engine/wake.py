"""Waking the loop from another thread."""

import contextlib
import os


class Wake:
    """An eventfd: any thread sets it, the loop selects on it and clears it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @staticmethod
    def open() -> "Wake":
        """Errors: OSError."""
        return Wake(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    def set(self) -> None:
        """There is news. Cost: one system call; sets of a moment are one."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """The news is being looked at."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def fileno(self) -> int:
        """To select on."""
        return self._fd

    def close(self) -> None:
        """No thread may set it any more."""
        os.close(self._fd)
