"""The faults of a soak: kills of the engine, and a minute in which the file system of the SSD tier is full.

The daemon runs in a mount namespace of its own, with a small tmpfs for its SSD tier. The mount ends with the daemon. A
user who is not root needs user namespaces.
"""

import asyncio
import errno
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.engine_pid import kill_engine

MIB = 1 << 20
_FILLER = "filler"


@dataclass(slots=True)
class Harm:
    """The times at which harm was done, and the end of the restarts. Times are those of `time.monotonic`."""

    kills_s: list[float] = field(default_factory=list[float])
    full_s: tuple[float, float] | None = None  # begin and end of the time with a full disk


def namespace_command(mount: Path, size_bytes: int, command: Sequence[str]) -> list[str]:
    """Return the command that runs `command` with a tmpfs of this size at `mount`, which nobody else sees."""
    unshare = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    script = f'mount -t tmpfs -o size={size_bytes},mode=0700 tiercel-soak "$0" && exec "$@"'
    return [*unshare, "sh", "-c", script, str(mount), *command]


def has_namespaces(folder: Path) -> bool:
    """True if this user can mount a tmpfs in a namespace, and the programs for it are there."""
    if not all(map(shutil.which, ("unshare", "mount", "fallocate"))):
        return False
    probe = subprocess.run(namespace_command(folder, MIB, ["true"]), capture_output=True, check=False)
    return probe.returncode == 0


def fill_disk(folder: Path) -> None:
    """Take all free space of the file system, and all of each file of blocks but its first eighth.

    The files of blocks are allocated in full when they are opened, so that a full disk alone would not be noticed.
    Writes to the part that was taken fail with ENOSPC, and its blocks are lost, as if the disk had lost them.
    """
    for file in folder.glob("**/*.blocks"):
        size = file.stat().st_size
        kept = size // 8 // MIB * MIB
        command = ["fallocate", "--punch-hole", "--offset", str(kept), "--length", str(size - kept), str(file)]
        subprocess.run(command, check=True)
    with (folder / _FILLER).open("wb", buffering=0) as filler:
        size = MIB
        while size:
            try:
                filler.write(b"\0" * size)
            except OSError as exc:
                if exc.errno != errno.ENOSPC:
                    raise
                size = size // 2 if size > 4096 else 0


def empty_disk(folder: Path) -> None:
    """Give the taken space back."""
    (folder / _FILLER).unlink()


async def kill_at(daemon_pid: int, moments_s: Sequence[float], harm: Harm) -> None:
    """Kill the engine at these moments, as long as there is one: fewer kills than planned are a missed check."""
    for moment_s in moments_s:
        await asyncio.sleep(max(moment_s - time.monotonic(), 0))
        try:
            await asyncio.to_thread(kill_engine, daemon_pid)
        except TimeoutError:
            return
        harm.kills_s.append(time.monotonic())


async def fill_between(folder: Path, begin_s: float, end_s: float, harm: Harm) -> None:
    """Keep the disk full from one moment to another."""
    await asyncio.sleep(max(begin_s - time.monotonic(), 0))
    await asyncio.to_thread(fill_disk, folder)
    began_s = time.monotonic()
    await asyncio.sleep(max(end_s - time.monotonic(), 0))
    await asyncio.to_thread(empty_disk, folder)
    harm.full_s = began_s, time.monotonic()
