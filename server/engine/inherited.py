"""What outlives the engine: the memory of its host tier, and the hold on the folders of its SSD tier."""

import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from tiercel.lock import lock_folder
from tiercel.settings import EngineSettings


class InheritedResources:
    """Descriptors that every engine inherits, one after the other.

    The memfd takes no memory until an engine writes to it, and it is gone with the last process that has it. The
    locks are inherited too: an engine that survives us for a moment still holds what it writes to.
    """

    def __init__(self, arena_fd: int, lock_fds: tuple[int, ...], closing: ExitStack) -> None:
        self._arena_fd = arena_fd
        self._lock_fds = lock_fds
        self._closing = closing

    @staticmethod
    def open(settings: EngineSettings) -> "InheritedResources":
        """Effects: folders of the SSD tier are made with mode 0700. Errors: ConfigError when one is not ours alone."""
        with ExitStack() as closing:
            arena_fd = os.memfd_create("tiercel-kv")
            closing.callback(os.close, arena_fd)
            lock_fds: list[int] = []
            for folder in settings.kv_disk_paths:
                lock_fds.append(lock_folder(Path(folder)))
                closing.callback(os.close, lock_fds[-1])
            return InheritedResources(arena_fd, tuple(lock_fds), closing.pop_all())

    @property
    def fds(self) -> tuple[int, ...]:
        """What the engine inherits, under the same numbers."""
        return (self._arena_fd, *self._lock_fds)

    @property
    def arguments(self) -> tuple[str, ...]:
        """How the engine is told."""
        return ("--arena-fd", str(self._arena_fd))

    def close(self) -> None:
        """Let go; the last engine must be gone."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
