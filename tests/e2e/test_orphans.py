"""No engine outlives its HTTP process, whatever the engine is doing when the HTTP process is killed."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.daemon import Daemon, daemon
from tests.processes import wait_gone

CLIENTS = 6
LONG_PROMPT = list(range(300, 1300)) * 3  # tokens


def state_of(pid: int) -> str:
    """The state of a process as the kernel names it: R, S, T, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def wait_child(running: Daemon) -> int:
    """Wait until the engine process exists, which then still has to import torch."""
    children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children")
    while not children.read_text():
        time.sleep(0.002)
    return running.engine_pid()


def test_an_engine_that_loads_ends_with_its_http_process(tmp_path: Path) -> None:
    with daemon(tmp_path, wait=False) as running:
        engine = wait_child(running)
        running.stop(signal.SIGKILL)
        wait_gone(engine)


@pytest.mark.slow
def test_an_idle_engine_ends_with_its_http_process(tmp_path: Path) -> None:
    with daemon(tmp_path) as running:
        engine = running.engine_pid()
        running.stop(signal.SIGKILL)
        wait_gone(engine)


@pytest.mark.slow
def test_a_stopped_engine_ends_with_its_http_process(tmp_path: Path) -> None:
    with daemon(tmp_path) as running:
        engine = running.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        while state_of(engine) != "T":
            time.sleep(0.005)
        running.stop(signal.SIGKILL)
        wait_gone(engine)


def test_an_engine_in_a_long_prefill_ends_with_its_http_process(tmp_path: Path) -> None:
    with daemon(tmp_path) as running:
        engine = running.engine_pid()

        def ask(number: int) -> None:
            body = {"prompt": [number + 10, *LONG_PROMPT], "max_tokens": 500, "ignore_eos": True}
            with pytest.raises(httpx.TransportError):
                httpx.post(f"{running.url}/v1/completions", json=body, timeout=60)

        with ThreadPoolExecutor(CLIENTS) as clients:
            asked = [clients.submit(ask, number) for number in range(CLIENTS)]
            while running.metric("vllm:num_requests_running") < 1:
                assert not any(future.done() for future in asked)
                time.sleep(0.002)
            running.stop(signal.SIGKILL)
            wait_gone(engine)
            for future in asked:
                future.result()
