"""A time limit for calls to a disk, which may hang and cannot be ended."""

import errno
import threading
from collections.abc import Callable
from typing import TypeVar

from tiercel.values.errors import ConfigError

T = TypeVar("T")


def within(limit_s: float, work: Callable[[], T]) -> T:
    """Do work on a thread. Errors: those of the work; TimeoutError if it takes longer, and then the thread goes on.

    The thread is a daemon, so that it does not keep the process alive. What the work uses must stay open after a
    TimeoutError.
    Cost: the start of a thread.
    """
    results: list[T] = []
    errors: list[ConfigError | OSError] = []

    def run() -> None:
        try:
            results.append(work())
        except (ConfigError, OSError) as exc:
            errors.append(exc)

    thread = threading.Thread(target=run, name="disk-call", daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if thread.is_alive():
        raise TimeoutError(errno.ETIMEDOUT, f"the disk has not answered for {limit_s:g} s")
    if not results:  # the traceback of the thread stands in the log
        raise ConfigError("kv.disk", "a call to the disk failed")
    return results[0]
