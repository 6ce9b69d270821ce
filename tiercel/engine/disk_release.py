"""Giving up the SSD tier for good while the engine serves on, so that another daemon can take over its volume."""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from tiercel.engine.progress import Outbox
from tiercel.kvcache.background import BackgroundWork
from tiercel.wire.frames import DiskReleased

log = logging.getLogger(__name__)


class HasVolume(Protocol):
    """The tiers of an engine, of which one is on the SSD."""

    def release_disk(self) -> bool:
        """Wait for calls under way, close the volume, and return whether it is closed. Blocks for some seconds."""
        ...


class DiskRelease:
    """Closes the volume on a thread, because the last sync may take seconds; the loop serves meanwhile."""

    def __init__(self, tiers: HasVolume, idle: BackgroundWork, post: Outbox, wake: Callable[[], None]) -> None:
        self._tiers = tiers
        self._idle = idle
        self._post = post
        self._wake = wake
        self._thread: threading.Thread | None = None
        self._is_released: bool | None = None  # None until the thread has ended, and after the answer

    def begin(self, lock_fds: Sequence[int]) -> None:
        """Read and write nothing more, close the volume, then the descriptors that hold its locks."""
        if self._thread is not None:
            return
        self._idle.close_disk(is_readable=False)
        self._thread = threading.Thread(target=self._run, args=(tuple(lock_fds),), name="kv-release", daemon=True)
        self._thread.start()

    def tend(self) -> None:
        """Report the end, once. Called by the loop's thread."""
        if self._is_released is not None:
            log.info("kv volume released is_released=%s", self._is_released)
            self._post.post(DiskReleased(self._is_released))
            self._is_released = None

    def _run(self, lock_fds: tuple[int, ...]) -> None:
        is_released = self._tiers.release_disk()
        if is_released:
            for fd in lock_fds:
                os.close(fd)
        self._is_released = is_released
        self._wake()
