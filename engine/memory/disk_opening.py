"""Opening the SSD tier, or doing without it: a disk that fails must not end an engine for which streams wait."""

import errno
import logging
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from tiercel.device.volume import Volume, open_volume
from tiercel.errors import ConfigError, system_error
from tiercel.kv_folder import holds_lock, lock_folder
from tiercel.settings import EngineSettings

log = logging.getLogger(__name__)

OPEN_S = 30.0  # to open a volume without which the engine may serve; the supervisor waits for a minute at least

T = TypeVar("T")


def open_disk(
    settings: EngineSettings, block_bytes: int, fingerprint: bytes, closing: ExitStack, limit_s: float
) -> Volume | None:
    """Open the volume, and lock folders that the parent process does not hold. It is closed by the stack.

    Return None if that fails and the SSD tier is optional; the log then says why. Errors: ConfigError.
    """
    folders = tuple(map(Path, settings.kv_disk_paths))

    def work() -> tuple[Volume, ExitStack]:
        with ExitStack() as opening:
            for folder in folders:
                if not holds_lock(folder):  # an engine without a daemon, or the folder was replaced
                    opening.callback(os.close, lock_folder(folder))
            volume = open_volume(folders, settings.kv_disk_bytes, block_bytes, fingerprint)
            opening.callback(volume.close)
            return volume, opening.pop_all()

    try:
        volume, opened = _within(limit_s, work) if settings.kv_disk_optional else work()
    except (ConfigError, OSError) as exc:
        if not settings.kv_disk_optional:
            raise
        shown = ",".join(settings.kv_disk_paths)
        log.error("kv disk tier off folders=%s error=%s reason=%r", shown, system_error(exc), str(exc))
        return None
    closing.enter_context(opened)
    return volume


def _within(limit_s: float, work: Callable[[], T]) -> T:
    """Do work on a thread. Errors: those of the work; TimeoutError if it takes longer, and then the thread goes on.

    A call to a disk that hangs cannot be ended. The thread is a daemon, so that it does not keep the process alive.
    """
    results: list[T] = []
    errors: list[ConfigError | OSError] = []

    def run() -> None:
        try:
            results.append(work())
        except (ConfigError, OSError) as exc:
            errors.append(exc)

    thread = threading.Thread(target=run, name="kv-open", daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if thread.is_alive():
        raise TimeoutError(errno.ETIMEDOUT, f"the disk has not answered for {limit_s:g} s")
    if not results:  # the traceback of the thread stands in the log
        raise ConfigError("kv.disk", "opening the volume failed")
    return results[0]
