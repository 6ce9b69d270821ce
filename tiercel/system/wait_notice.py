"""A line on standard error every few seconds while a command waits, that says what it waits for."""

import threading
import time
from types import TracebackType
from typing import Self

from tiercel.system.standard_streams import error_stream, say

_EVERY_S = 5.0


class WaitNotice:
    """Says what the block waits for, first after 5 seconds. `words` may change meanwhile. Use with `with`."""

    def __init__(self, words: str, every_s: float = _EVERY_S) -> None:
        self.words = words
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notice", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Say nothing more."""
        self._ended.set()

    def _run(self) -> None:
        start_s = time.monotonic()
        while not self._ended.wait(self._every_s):
            say(f"tiercel: waiting for {self.words} ({time.monotonic() - start_s:.0f} s)", error_stream())
