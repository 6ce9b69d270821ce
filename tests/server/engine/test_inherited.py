"""What the HTTP process holds for its engines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiercel.errors import ConfigError
from tiercel.lock import lock_folder, lock_holder
from tiercel.server.engine.child import EngineChild
from tiercel.server.engine.inherited import Keep
from tiercel.settings import EngineSettings

_ENGINE = """
import argparse, os, socket
parser = argparse.ArgumentParser()
parser.add_argument("--fd", type=int)
parser.add_argument("--arena-fd", type=int)
given = parser.parse_args()
before = os.pread(given.arena_fd, 100, 0)
os.ftruncate(given.arena_fd, 4096)
os.pwrite(given.arena_fd, b"left by %d" % os.getpid(), 0)
socket.socket(fileno=given.fd).sendall(before.rstrip(b"\\0") or b"nothing")
"""


def run_engine(keep: Keep) -> tuple[bytes, int]:
    """What it found, and its pid."""
    with EngineChild.start((sys.executable, "-c", _ENGINE), keep) as child:
        return child.sock.recv(100), child.pid


def test_an_engine_finds_what_the_one_before_it_left() -> None:
    with Keep.open(EngineSettings(model="unused")) as keep:
        found, pid = run_engine(keep)
        assert found == b"nothing"
        assert run_engine(keep)[0] == f"left by {pid}".encode()


def test_the_folders_are_held_until_the_end(tmp_path: Path) -> None:
    folders = (str(tmp_path / "a"), str(tmp_path / "b"))
    settings = EngineSettings(model="unused", kv_disk_paths=folders, kv_disk_bytes=1)
    with Keep.open(settings) as keep:
        assert len(keep.fds) == 3
        assert lock_holder(tmp_path / "b") == os.getpid()
        with pytest.raises(ConfigError, match=f"in use by the daemon with pid {os.getpid()}"):
            Keep.open(settings)
    os.close(lock_folder(tmp_path / "a"))


def test_a_folder_that_is_taken_leaves_nothing_held(tmp_path: Path) -> None:
    taken = lock_folder(tmp_path / "b")
    settings = EngineSettings(model="unused", kv_disk_paths=(str(tmp_path / "a"), str(tmp_path / "b")), kv_disk_bytes=1)
    with pytest.raises(ConfigError):
        Keep.open(settings)
    assert lock_holder(tmp_path / "a") is None
    os.close(taken)


def test_an_engine_that_outlives_us_still_holds_the_folder(tmp_path: Path) -> None:
    settings = EngineSettings(model="unused", kv_disk_paths=(str(tmp_path / "a"),), kv_disk_bytes=1)
    with Keep.open(settings) as keep:
        child = subprocess.Popen(["sleep", "60"], pass_fds=keep.fds)
    try:
        assert lock_holder(tmp_path / "a") == os.getpid()
    finally:
        child.kill()
        child.wait()
    assert lock_holder(tmp_path / "a") is None


def test_nothing_is_inherited_by_accident() -> None:
    with Keep.open(EngineSettings(model="unused")) as keep:
        assert not any(os.get_inheritable(fd) for fd in keep.fds)
