"""Faults of the disk under the whole daemon, injected with strace: every answer is right, no request fails."""

import os
import time
from pathlib import Path

import pytest

from tests.e2e.daemon import Daemon, daemon
from tests.e2e.prompts import ONE_THREAD, PROMPTS, text
from tests.programs import find_program

pytestmark = pytest.mark.slow

WRITES, READS = "pwrite64,pwritev,pwritev2", "pread64,preadv,preadv2"


def tracer(inject: str) -> tuple[str, ...]:
    """Run the daemon and its engine with a failing system call."""
    calls = inject.split(":", 1)[0]
    options = ("-DDD", "-f", "-qq", "-o", os.devnull)
    return (find_program("strace"), *options, "-e", f"trace={calls}", "-e", f"inject={inject}")


def flags(folder: Path) -> tuple[str, ...]:
    """Return flags for memory for a few of the prompts and disk space for all of them."""
    disk = ("--kv-disk-path", str(folder / "kv"), "--kv-disk-size", "64M")
    return (*disk, "--num-gpu-blocks-override", "120", "--max-model-len", "1024", *ONE_THREAD)


def ask_all(running: Daemon, answers: dict[str, str]) -> None:
    for prompt in PROMPTS:
        assert text(running, prompt) == answers[prompt]
        time.sleep(0.1)  # blocks are written in idle time


def disk_state(running: Daemon) -> str:
    return next(
        state for state in ("on", "read_only", "off") if running.metric(f'tiercel_kv_disk_state{{state="{state}"}}')
    )


def wait_state(running: Daemon, state: str) -> None:
    end_s = time.monotonic() + 10
    while (now := disk_state(running)) != state:
        assert time.monotonic() < end_s, f"the disk is {now}"
        time.sleep(0.05)


def fill(folder: Path, answers: dict[str, str]) -> None:
    with daemon(folder, *flags(folder)) as running:
        ask_all(running, answers)
        assert running.stop() == 0


@pytest.mark.parametrize(
    ("inject", "state"),
    [
        (f"{WRITES}:error=ENOSPC:when=60+", "read_only"),
        (f"{WRITES}:error=EIO:when=60+", "off"),
        (f"{WRITES}:retval=512:when=60+3", None),
    ],
    ids=["no space", "error on write", "short writes"],
)
def test_failed_writes_fail_no_request(tmp_path: Path, answers: dict[str, str], inject: str, state: str | None) -> None:
    with daemon(tmp_path, *flags(tmp_path), under=tracer(inject)) as running:
        for _ in range(2):
            ask_all(running, answers)
        if state is not None:
            wait_state(running, state)
        running.assert_nothing_held()
        assert running.stop() == 0
    with daemon(tmp_path, *flags(tmp_path)) as again:
        ask_all(again, answers)


@pytest.mark.parametrize(
    "inject",
    [
        f"{READS}:error=EIO:when=300+",
        f"{READS}:retval=512:when=300+2",
        f"{READS}:delay_enter=5000000:when=300+",
    ],
    ids=["error on read", "short reads", "a stall of five seconds"],
)
def test_blocks_with_failed_reads_are_recomputed(tmp_path: Path, answers: dict[str, str], inject: str) -> None:
    fill(tmp_path, answers)
    with daemon(tmp_path, *flags(tmp_path), under=tracer(inject)) as running:
        began_s = time.monotonic()
        for _ in range(2):
            ask_all(running, answers)
        assert time.monotonic() - began_s < 60
        running.assert_nothing_held()
