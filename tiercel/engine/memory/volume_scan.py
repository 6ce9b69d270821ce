"""The scan of the SSD volume at the start of an engine, on a thread beside the loop."""

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable

from tiercel.device.processors import lower_priority
from tiercel.values.ids import BlockKey, SlotId

log = logging.getLogger(__name__)

_CLOSE_S = 5.0  # to wait for a read in progress
_BATCH = 256  # entries taken by the loop in one step
_MAX_WAITING = 65_536  # entries that were read and not yet taken


class VolumeScan:
    """Reads the entries of the volume on a thread; the loop takes them in batches.

    An entry is only a claim: the first read of its block verifies it. If a key occurs twice, the later slot counts.
    """

    def __init__(self, entries: Iterable[tuple[int, bytes]], wake: Callable[[], None]) -> None:
        self._entries = entries
        self._wake = wake
        self._found: deque[tuple[SlotId, BlockKey]] = deque()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kv-recover", daemon=True)
        self._is_closed = False
        self._is_read = False

    @property
    def is_done(self) -> bool:
        """Whether every entry was read and taken."""
        return self._is_read and not self._found

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def take(self, limit: int = _BATCH) -> list[tuple[SlotId, BlockKey]]:
        """Return (slot of the pool, key) of at most `limit` entries, without waiting."""
        with self._changed:
            taken = [self._found.popleft() for _ in range(min(limit, len(self._found)))]
            self._changed.notify()
        return taken

    def close(self) -> None:
        """Stop reading, and wait up to 5 s for the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        lower_priority()
        entries = iter(self._entries)
        try:
            while piece := [(SlotId(slot + 1), BlockKey(key)) for slot, key in itertools.islice(entries, _BATCH)]:
                with self._changed:
                    self._changed.wait_for(lambda: len(self._found) < _MAX_WAITING or self._is_closed)
                    if self._is_closed:
                        return
                    self._found += piece
                self._wake()
        except OSError as exc:
            log.warning("kv volume scan ended early error=%s", exc.strerror)
        finally:
            self._is_read = True
            self._wake()
