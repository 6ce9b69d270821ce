"""The resources that the HTTP process keeps for its engine processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiercel.server.client.child import EngineChild
from tiercel.server.client.inherited import InheritedResources
from tiercel.settings.settings import EngineSettings
from tiercel.system.kv_folder import lock_folder, lock_holder
from tiercel.values.errors import ConfigError

_ENGINE = """
import argparse, os, socket
parser = argparse.ArgumentParser()
parser.add_argument("--fd", type=int)
parser.add_argument("--arena-fd", type=int)
parser.add_argument("--record-fd", type=int)
given = parser.parse_args()
before = os.pread(given.arena_fd, 100, 0)
os.ftruncate(given.arena_fd, 4096)
os.pwrite(given.arena_fd, b"left by %d" % os.getpid(), 0)
socket.socket(fileno=given.fd).sendall(before.rstrip(b"\\0") or b"nothing")
"""


def run_engine(inherited: InheritedResources) -> tuple[bytes, int]:
    """Run an engine; return the text that it found in the memory, and its pid."""
    with EngineChild.start((sys.executable, "-c", _ENGINE), inherited) as child:
        return child.sock.recv(100), child.pid


def test_an_engine_finds_the_memory_of_the_engine_before_it() -> None:
    with InheritedResources.open(EngineSettings(model="unused")) as inherited:
        found, pid = run_engine(inherited)
        assert found == b"nothing"
        assert run_engine(inherited)[0] == f"left by {pid}".encode()


def test_the_folders_are_locked_until_the_resources_are_closed(tmp_path: Path) -> None:
    folders = (str(tmp_path / "a"), str(tmp_path / "b"))
    settings = EngineSettings(model="unused", kv_disk_paths=folders, kv_disk_bytes=1)
    with InheritedResources.open(settings) as inherited:
        assert len(inherited.fds) == 4  # two memfds, two locks
        assert lock_holder(tmp_path / "b") == os.getpid()
        with pytest.raises(ConfigError, match=f"in use by the daemon with pid {os.getpid()}"):
            InheritedResources.open(settings)
    os.close(lock_folder(tmp_path / "a"))


def test_a_locked_folder_leaves_no_other_folder_locked(tmp_path: Path) -> None:
    taken = lock_folder(tmp_path / "b")
    settings = EngineSettings(model="unused", kv_disk_paths=(str(tmp_path / "a"), str(tmp_path / "b")), kv_disk_bytes=1)
    with pytest.raises(ConfigError):
        InheritedResources.open(settings)
    assert lock_holder(tmp_path / "a") is None
    os.close(taken)


def test_an_engine_that_outlives_its_parent_still_holds_the_lock(tmp_path: Path) -> None:
    settings = EngineSettings(model="unused", kv_disk_paths=(str(tmp_path / "a"),), kv_disk_bytes=1)
    with InheritedResources.open(settings) as inherited:
        child = subprocess.Popen(["sleep", "60"], pass_fds=inherited.fds)
    try:
        assert lock_holder(tmp_path / "a") == os.getpid()
    finally:
        child.kill()
        child.wait()
    assert lock_holder(tmp_path / "a") is None


def test_the_descriptors_are_not_inheritable_by_other_processes() -> None:
    with InheritedResources.open(EngineSettings(model="unused")) as inherited:
        assert not any(os.get_inheritable(fd) for fd in inherited.fds)
