"""Wake the loop from another thread."""

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
        """Wake the loop. Cost: one system call; several calls before the loop clears it wake it once."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Reset the event before looking for the reason of a wake-up."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def fileno(self) -> int:
        """Return the file descriptor for `select`."""
        return self._fd

    def close(self) -> None:
        """Close the descriptor. No thread may call `set` afterwards."""
        os.close(self._fd)
