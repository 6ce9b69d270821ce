"""A `tiercel serve` of its own for a benchmark."""

import contextlib
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

TIERCEL = str(Path(sys.executable).with_name("tiercel"))
_URL = re.compile(r"tiercel serves \S+ at (http://\S+)")
_READY_S = 300.0
_STOP_S = 60.0


class Daemon(NamedTuple):
    """A running daemon."""

    url: str
    log: Path  # its output
    process: "subprocess.Popen[bytes]"


@contextlib.contextmanager
def running_daemon(
    flags: Sequence[str],
    log: Path,
    *,
    command: Sequence[str] = (TIERCEL, "serve"),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Daemon]:
    """Serve on a free port until the block ends; enter the block when `/ready` answers.

    `environment` is added to that of the benchmark. Raises SystemExit with the log if the daemon does not start.
    """
    with (
        log.open("wb") as out,
        subprocess.Popen(
            [*command, *flags, "--port", "0"], stdout=out, stderr=out, env={**os.environ, **(environment or {})}
        ) as process,
    ):
        try:
            yield Daemon(_ready_url(process, log), log, process)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def is_ready(url: str) -> bool:
    """Return whether `/ready` answers with status 200."""
    with contextlib.suppress(urllib.error.URLError, OSError):
        return urllib.request.urlopen(f"{url}/ready", timeout=5).status == 200
    return False


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process, including threads that have ended (`clock_getcpuclockid`)."""
    return time.clock_gettime((~pid << 3) | 2)


def _ready_url(process: "subprocess.Popen[bytes]", log: Path) -> str:
    end_s = time.monotonic() + _READY_S
    while process.poll() is None and time.monotonic() < end_s:
        found = _URL.search(log.read_text())
        if found is not None and is_ready(found[1]):
            return found[1]
        time.sleep(0.05)
    raise SystemExit(f"tiercel did not start (exit code {process.poll()}):\n{log.read_text()}")
