"""Notifications to a service manager: a socket stands for systemd, the daemon is real, its engine has no model."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tests.server.harness import text_body
from tests.server.test_launch import FAKE, Started
from tiercel.server.control.systemd import SystemdNotifier
from tiercel.values.clock import ManualClock

START = """
import json, sys
from tiercel.server.launch import serve
from tiercel.settings.config import resolve
origin = resolve(json.loads(sys.argv[1]))
sys.exit(serve(origin.settings, origin=origin, command=json.loads(sys.argv[2])))
"""
PING_S = 0.1


class Manager:
    """The socket of NOTIFY_SOCKET."""

    def __init__(self, address: str, sock: socket.socket) -> None:
        self.address = address
        self._sock = sock

    def hear(self, *, pings: bool = False) -> dict[str, str]:
        """Return the next message, without watchdog pings by default."""
        while True:
            lines = self._sock.recv(4096).decode().splitlines()
            message = dict(line.split("=", 1) for line in lines)
            if pings or message != {"WATCHDOG": "1"}:
                return message

    def hear_nothing(self, for_s: float) -> bool:
        """Wait until no message arrives for this time; return whether that happened."""
        self._sock.settimeout(for_s)
        with suppress(TimeoutError):
            for _ in range(200):
                self._sock.recv(4096)
            return False
        return True


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    name = str(tmp_path_factory.mktemp("n") / "s")
    address = name if request.param == "path" else f"@tiercel{name}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(name if request.param == "path" else f"\0tiercel{name}")
        sock.settimeout(20)
        yield Manager(address, sock)


@contextmanager
def started(folder: Path, manager: Manager, config: str, **fake: str) -> Iterator[Started]:
    """A daemon under the manager, with a watchdog."""
    (folder / "config.json").write_text("{}")
    file = folder / "tiercel.toml"
    file.write_text(config)
    flags = {"model": str(folder), "served_model_name": ["tiny"], "port": 0, "config": str(file)}
    watch = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": str(int(2e6 * PING_S))}
    own = {name: value for name, value in os.environ.items() if not name.startswith(("TIERCEL_", "VLLM_"))}
    process = subprocess.Popen(
        [sys.executable, "-c", START, json.dumps(flags), json.dumps([sys.executable, str(FAKE)])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**own, **watch, **fake},
    )
    try:
        yield Started(process)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(model_folder, tmp_path / "model")


@pytest.mark.sampled(1)
def test_the_manager_is_notified_of_start_reload_and_stop(folder: Path, manager: Manager) -> None:
    with started(folder, manager, "max-logprobs = 5\n") as server:
        assert manager.hear(pings=True) == {"WATCHDOG": "1"}  # while it loads
        server.await_url()
        status = f"serving tiny at {server.url}"
        assert manager.hear() == {"READY": "1", "STATUS": status}
        assert manager.hear(pings=True) == {"WATCHDOG": "1"}
        (folder / "tiercel.toml").write_text("max-logprobs = 6\n")
        server.process.send_signal(signal.SIGHUP)
        reloading = manager.hear()
        assert (reloading["RELOADING"], reloading["MONOTONIC_USEC"].isdecimal()) == ("1", True)
        assert manager.hear() == {"READY": "1", "STATUS": status}
        (folder / "tiercel.toml").write_text("block-size = 32\n")
        server.process.send_signal(signal.SIGHUP)
        assert manager.hear()["RELOADING"] == "1"
        refused = manager.hear()
        assert refused["READY"] == "1"
        assert "the last reload was refused" in refused["STATUS"]
        server.process.send_signal(signal.SIGTERM)
        stopping = manager.hear()
        assert stopping["STOPPING"] == "1"
        assert int(stopping["EXTEND_TIMEOUT_USEC"]) > 30e6
        code, err = server.wait()
        assert code == 0
        events = [json.loads(line)["event"] for line in err.splitlines()]
        assert (events.count("config_changed"), events.count("config_refused")) == (1, 1)


@pytest.mark.parametrize("manager", ["path"], indirect=True)
def test_every_reload_ends_however_wrong_the_file_is(folder: Path, manager: Manager) -> None:
    with started(folder, manager, "") as server:
        server.await_url()
        assert manager.hear()["READY"] == "1"
        (folder / "tiercel.toml").write_text(f"allowed-origins = {'[' * 3000}")
        server.process.send_signal(signal.SIGHUP)
        assert manager.hear()["RELOADING"] == "1"
        assert "the last reload was refused" in manager.hear()["STATUS"]
        server.process.send_signal(signal.SIGTERM)
        code, err = server.wait()
        assert (code, "Traceback" in err) == (0, False)


@pytest.mark.parametrize("manager", ["path"], indirect=True)
@pytest.mark.slow
def test_the_watchdog_gets_pings_while_hung_engines_are_restarted(folder: Path, manager: Manager) -> None:
    with started(folder, manager, "stall-timeout = 1\n", FAKE_HANG_AT="0") as server:
        server.await_url()
        assert manager.hear()["READY"] == "1"
        for _ in range(20):
            assert manager.hear(pings=True) == {"WATCHDOG": "1"}  # idle is well, however long

        def ask() -> None:
            with suppress(httpx.HTTPError):
                httpx.post(f"{server.url}/v1/completions", json=text_body(), timeout=60)

        asking = threading.Thread(target=ask)
        asking.start()
        for _ in range(20):
            assert manager.hear(pings=True) == {"WATCHDOG": "1"}
        code, err = server.wait()
        asking.join()
        assert code == 3
        assert "tiercel: the engine died 3 times within 60 s, last: it hung: no step ended in time" in err.splitlines()


def test_the_watchdog_gets_no_pings_while_a_hung_engine_cannot_be_ended(manager: Manager) -> None:
    async def watch() -> None:
        notifier = SystemdNotifier(manager.address, ManualClock())
        with suppress(TimeoutError):
            async with asyncio.timeout(10 * PING_S):
                await notifier.watch(2 * PING_S, lambda: False)

    asyncio.run(watch())
    assert manager.hear_nothing(PING_S)


def test_without_a_manager_or_with_a_deaf_one_nothing_happens(tmp_path: Path) -> None:
    for address in (None, str(tmp_path / "nobody"), "@nobody-listens-here"):
        notifier = SystemdNotifier(address, ManualClock())
        notifier.ready("serving")
        notifier.reloading()
        notifier.stopping("leaving", 1.0)


def test_a_status_is_one_line(manager: Manager) -> None:
    SystemdNotifier(manager.address, ManualClock()).ready("one\nREADY=0")
    assert manager.hear() == {"READY": "1", "STATUS": "one READY=0"}


def test_a_reload_carries_the_monotonic_time(manager: Manager) -> None:
    SystemdNotifier(manager.address, ManualClock(12.5)).reloading()
    assert manager.hear() == {"RELOADING": "1", "MONOTONIC_USEC": "12500000"}
