"""A process that is tied to its parent: when it ends, and when it does not."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import wait_gone
from tiercel.engine.orphan import EXIT_ORPHAN

ROOT = Path(__file__).resolve().parents[2]

CHILD = """
import sys, time
from tiercel.engine.orphan import ask_kernel, end_with_parent
end_with_parent(int(sys.argv[1]), ask_kernel if sys.argv[2] == "kernel" else lambda: None)
print("tied", flush=True)
time.sleep(600)
"""
PARENT = """
import os, socket, subprocess, sys
ours, theirs = socket.socketpair()
command = [sys.executable, "-c", sys.argv[1], str(theirs.fileno()), sys.argv[2]]
child = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE)
theirs.close()
child.stdout.readline()
print(child.pid, flush=True)
if sys.stdin.readline() == "close\\n":
    ours.close()
    try:
        code = child.wait(2.5)
    except subprocess.TimeoutExpired:
        code = "alive"
    print(code, flush=True)
    child.kill()
sys.stdin.readline()
"""


def start_parent(tie: str) -> "tuple[subprocess.Popen[str], int]":
    """Start a process with a tied child; return it with the child's process id."""
    command = [sys.executable, "-c", PARENT, CHILD, tie]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


@pytest.mark.parametrize("tie", ["kernel", "thread"])
def test_a_tied_process_ends_when_its_parent_is_killed(tie: str) -> None:
    parent, child = start_parent(tie)
    parent.kill()
    parent.communicate()
    wait_gone(child)


def test_a_stopped_process_ends_when_its_parent_is_killed() -> None:
    parent, child = start_parent("kernel")
    os.kill(child, signal.SIGSTOP)
    parent.kill()
    parent.communicate()
    wait_gone(child)


def test_a_parent_that_closes_the_socket_and_lives_is_left_to_end_its_child() -> None:
    parent, _ = start_parent("kernel")
    said, _ = parent.communicate("close\n\n")
    assert said == "alive\n"


def test_a_process_whose_parent_is_dead_already_ends_at_once() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        command = [sys.executable, "-c", CHILD, str(theirs.fileno()), "kernel"]
        ended = subprocess.run(command, pass_fds=[theirs.fileno()], capture_output=True, cwd=ROOT, timeout=60)
    assert ended.returncode == 4
    assert not ended.stdout


def test_the_engine_is_tied_to_its_parent_before_it_loads() -> None:
    """The other end of its socket is closed already, as if the HTTP process had died during the start."""
    ours, theirs = socket.socketpair()
    with theirs:
        ours.close()
        fd = theirs.fileno()
        command = [sys.executable, "-m", "tiercel.engine", "--fd", str(fd)]
        engine = subprocess.run(command, pass_fds=[fd], cwd=ROOT, timeout=60, check=False)
    assert engine.returncode == EXIT_ORPHAN
