"""Opening the SSD tier, or doing without it: a disk that fails must not end an engine for which streams wait."""

import logging
import os
from contextlib import ExitStack
from pathlib import Path

from tiercel.device.time_limit import within
from tiercel.device.volume import Volume, open_volume
from tiercel.settings.settings import EngineSettings
from tiercel.system.kv_folder import holds_lock, lock_folder
from tiercel.values.errors import ConfigError, system_error

log = logging.getLogger(__name__)

OPEN_S = 30.0  # to open a volume without which the engine may serve; the supervisor waits for a minute at least


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
        volume, opened = within(limit_s, work) if settings.kv_disk_optional else work()
    except (ConfigError, OSError) as exc:
        if not settings.kv_disk_optional:
            raise
        shown = ",".join(settings.kv_disk_paths)
        log.error("kv disk tier off folders=%s error=%s reason=%r", shown, system_error(exc), str(exc))
        return None
    closing.enter_context(opened)
    return volume
