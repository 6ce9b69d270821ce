"""Processes that a test did not start itself, and processes that get their listening sockets as from systemd."""

import os
import select
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

_ACTIVATE = """
import fcntl, os, sys
fds, names, pid = sys.argv[1:4]
copies = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 100) for fd in fds.split(",") if fd]
for number, copy in enumerate(copies, 3):
    os.dup2(copy, number)
    os.close(copy)
os.environ |= {"LISTEN_PID": pid or str(os.getpid()), "LISTEN_FDS": str(len(copies)), "LISTEN_FDNAMES": names}
os.execvp(sys.argv[4], sys.argv[4:])
"""


def activated(command: Sequence[str], sockets: Sequence[socket.socket], names: str = "", pid: str = "") -> list[str]:
    """Return a command that starts `command` with sockets from descriptor 3 on. Pass it the sockets (`pass_fds`)."""
    fds = ",".join(str(sock.fileno()) for sock in sockets)
    return [sys.executable, "-c", _ACTIVATE, fds, names, pid, *command]


def wait_gone(pid: int, patience_s: float = 30.0) -> None:
    """Wait until a process that is not our child has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], patience_s)[0], Path(f"/proc/{pid}/status").read_text()
    finally:
        os.close(handle)
