"""The real daemon and its banner and log: both may be lost, no answer may."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.daemon import TIERCEL, Daemon, daemon
from tests.e2e.prompts import ONE_THREAD
from tests.e2e.test_takeover import port_of

pytestmark = pytest.mark.slow

REDIRECTIONS = {
    "the disk is full": ">/dev/full",
    "the disk of both is full": ">/dev/full 2>&1",
    "both are closed": ">&- 2>&- <&-",
    "the reader has ended": "2>/dev/null | true",
    "the reader of both has ended": "2>&1 | true",
    "the reader of both does not read": "2>&1 | sleep 1000",
}
_REQUESTS = 400  # more lines than a pipe takes


@contextlib.contextmanager
def _redirected(folder: Path, redirection: str, *flags: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a daemon under `sh`, in a process group of its own that is ended as a whole."""
    script = f'"$0" serve --calibration-seconds 0 "$@" {redirection}'
    process = subprocess.Popen(["sh", "-c", script, TIERCEL, *flags], cwd=folder, process_group=0)
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


@pytest.mark.parametrize("redirection", REDIRECTIONS.values(), ids=REDIRECTIONS)
def test_a_takeover_goes_on_though_nobody_can_read_what_the_new_daemon_says(redirection: str, tmp_path: Path) -> None:
    flags = ("--control-socket", str(tmp_path / "control"), *ONE_THREAD)
    with daemon(tmp_path, *flags) as old:
        new = ("--port", port_of(old), "--takeover", "--log-level", "debug", *flags)
        with _redirected(tmp_path, redirection, *new):
            assert old.process.wait(120) == 0
            _assert_serves(old)


def _assert_serves(first: Daemon) -> None:
    with httpx.Client(base_url=first.url, timeout=60) as client:
        for _ in range(_REQUESTS):
            answer = client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 1})
            assert answer.status_code == 200, answer.text
