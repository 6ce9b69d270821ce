"""The process that listens on a port of this machine, as far as /proc tells, and the ways out of a port in use."""

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

_LISTEN = "0A"  # state of a socket in /proc/net/tcp
_PORT, _STATE, _INODE = 1, 3, 9  # columns


class PortHolder(NamedTuple):
    """A process that listens on a port."""

    pid: int
    command: str

    @property
    def is_tiercel(self) -> bool:
        """Whether the process is a `tiercel serve`."""
        words = self.command.split()
        return "serve" in words and any(Path(word).name == "tiercel" for word in words)


def ways_out(port: int, flag: str, proc: Path = Path("/proc")) -> str:
    """Return who has a port, and what the operator can do about it."""
    holder = find_holder(port, proc)
    if holder is None:
        return f"choose another {flag}, or end the process that listens there"
    if holder.is_tiercel and flag == "--port":
        return (
            f"tiercel serve with pid {holder.pid} listens there: choose another {flag}, replace that daemon with "
            f"--takeover, or end it with `tiercel drain --port {port}`"
        )
    return f"the process {holder.pid} ({holder.command[:80]}) listens there: choose another {flag}, or end that process"


def find_holder(port: int, proc: Path = Path("/proc")) -> PortHolder | None:
    """Return a process that listens on a TCP port; None if there is none, or it belongs to somebody else."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port, proc)}
    for folder in _processes(proc) if sockets else ():
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if any(_is_any(link, sockets) for link in (folder / "fd").iterdir()):
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                return PortHolder(int(folder.name), words.decode(errors="replace").strip())
    return None


def _processes(proc: Path) -> list[Path]:
    try:
        return [proc / name for name in os.listdir(proc) if name.isdigit()]
    except OSError:  # then the way out names no process
        return []


def _is_any(link: Path, sockets: set[str]) -> bool:
    try:
        return str(link.readlink()) in sockets
    except OSError:
        return False


def _listening(port: int, proc: Path) -> set[str]:
    inodes: set[str] = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / "net" / name).read_text().splitlines()[1:]:
                columns = line.split()
                if columns[_STATE] == _LISTEN and int(columns[_PORT].rsplit(":", 1)[1], 16) == port:
                    inodes.add(columns[_INODE])
    return inodes
