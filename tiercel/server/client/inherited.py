"""The resources that outlive an engine process: memory of its host tier, its step record, locks on its SSD folders."""

import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from tiercel.settings.settings import EngineSettings
from tiercel.system.kv_folder import lock_folder
from tiercel.system.process_limits import blame
from tiercel.values.errors import ConfigError
from tiercel.wire.step_record import StepRecord


class InheritedResources:
    """File descriptors that every engine process inherits.

    The memfd takes no memory until an engine writes to it, and is freed with the last process that has it open. An
    engine that outlives this process for a moment still holds the locks of the folders that it writes to.
    """

    def __init__(
        self,
        arena_fd: int,
        record_fd: int,
        record: StepRecord,
        lock_fds: tuple[int, ...],
        locks: ExitStack,
        closing: ExitStack,
        *,
        has_disk: bool = False,
        is_disk_optional: bool = False,
    ) -> None:
        self._arena_fd = arena_fd
        self._record_fd = record_fd
        self.record = record
        self._lock_fds = lock_fds
        self._locks = locks
        self._closing = closing
        self.has_disk = has_disk  # an engine may use the SSD folders; False after `unlock`
        self.is_disk_optional = is_disk_optional  # the first engine, too, starts without folders that cannot be used

    @staticmethod
    def open(settings: EngineSettings, *, is_takeover: bool = False) -> "InheritedResources":
        """Create the memfds and lock the SSD folders, which are created with mode 0700.

        Folders that cannot be used are left to the engine at a takeover and with --kv-disk-optional: it tries again,
        and serves without the SSD tier. Errors: ConfigError otherwise, if a limit of this process forbids the memfds,
        another process holds a folder, or other users can access it.
        """
        is_disk_optional = is_takeover or settings.kv_disk_optional
        with ExitStack() as closing:
            try:
                arena_fd = os.memfd_create("tiercel-kv")
                closing.callback(os.close, arena_fd)
                record_fd = os.memfd_create("tiercel-steps")
                closing.callback(os.close, record_fd)
                record = StepRecord.open(settings.record_rows, record_fd)
            except (OSError, ValueError) as exc:
                raise ConfigError("engine.memory_file", f"cannot open a file in memory: {blame(exc)}") from exc
            lock_fds: list[int] = []
            locks = closing.enter_context(ExitStack())
            for folder in settings.kv_disk_paths:
                try:
                    lock_fds.append(lock_folder(Path(folder)))
                except ConfigError as exc:
                    if is_disk_optional:
                        continue
                    raise ConfigError(exc.code, f"--kv-disk-path: {exc.message}", **exc.facts) from exc
                locks.callback(os.close, lock_fds[-1])
            return InheritedResources(
                *(arena_fd, record_fd, record, tuple(lock_fds), locks, closing.pop_all()),
                has_disk=bool(settings.kv_disk_paths),
                is_disk_optional=is_disk_optional,
            )

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors; the engine has them under the same numbers."""
        return (self._arena_fd, self._record_fd, *self._lock_fds)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments that tell the engine the numbers."""
        return ("--arena-fd", str(self._arena_fd), "--record-fd", str(self._record_fd))

    @property
    def lock_fds(self) -> tuple[int, ...]:
        """The descriptors that lock the SSD folders; none after `unlock`, nor of folders that could not be used."""
        return self._lock_fds

    def unlock(self) -> None:
        """Give up the SSD folders. No engine may have them open any more."""
        self.has_disk = False
        self._lock_fds = ()
        self._locks.close()

    def close(self) -> None:
        """Close the descriptors; no engine process may be left."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
