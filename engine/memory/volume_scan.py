"""The scan of the volume at the start of an engine, on a thread beside the loop."""

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable

from tiercel.ids import BlockKey, SlotId

log = logging.getLogger(__name__)

_CLOSE_S = 5.0  # to end a read in progress
_SCAN_PIECE = 256  # entries between two looks of the loop
_SCAN_AHEAD = 65_536  # entries that wait to be taken


class VolumeScan:
    """Reads what the volume holds on a thread of its own; the loop takes it in pieces.

    An entry is a claim: the first read proves it. Of a key that comes twice the later slot counts.
    """

    def __init__(self, entries: Iterable[tuple[int, bytes]], wake: Callable[[], None]) -> None:
        self._entries = entries
        self._wake = wake
        self._found: deque[tuple[SlotId, BlockKey]] = deque()
        self._room = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kv-recover", daemon=True)
        self._is_closed = False
        self._is_read = False

    @property
    def is_done(self) -> bool:
        """Everything was read and taken."""
        return self._is_read and not self._found

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def take(self, most: int = _SCAN_PIECE) -> list[tuple[SlotId, BlockKey]]:
        """(slot of the pool, key) of up to so many entries. Never waits."""
        with self._room:
            taken = [self._found.popleft() for _ in range(min(most, len(self._found)))]
            self._room.notify()
        return taken

    def close(self) -> None:
        """Stop reading."""
        with self._room:
            self._is_closed = True
            self._room.notify()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        entries = iter(self._entries)
        try:
            while piece := [(SlotId(slot + 1), BlockKey(key)) for slot, key in itertools.islice(entries, _SCAN_PIECE)]:
                with self._room:
                    self._room.wait_for(lambda: len(self._found) < _SCAN_AHEAD or self._is_closed)
                    if self._is_closed:
                        return
                    self._found += piece
                self._wake()
        except OSError as exc:
            log.warning("kv volume scan ended early error=%s", exc.strerror)
        finally:
            self._is_read = True
            self._wake()
