"""The path of a daemon's control socket."""

import hashlib
import os
import socket
import struct
from pathlib import Path

from tiercel.settings.config import runtime_folder
from tiercel.settings.settings import ServerSettings
from tiercel.system.kv_folder import open_folder

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred of unix(7)


def control_path(settings: ServerSettings, port: int) -> Path | None:
    """Return --control-socket, or a path named after the port or the Unix socket that the daemon serves on.

    None: the daemon has no control socket. `port` is the one that the daemon listens on, also where --port is 0.
    Effects: creates the folder of the default path with mode 0700.
    Errors:  ConfigError if other users can access that folder.
    """
    if settings.control_socket is not None:
        return Path(settings.control_socket) if settings.control_socket else None
    folder = runtime_folder()
    os.close(open_folder(folder, may_create=True))
    if settings.uds is None:
        return folder / f"{port}.sock"
    return folder / f"uds-{hashlib.sha256(os.path.abspath(settings.uds).encode()).hexdigest()[:16]}.sock"


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return process id and user id of the other end of a Unix socket."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def is_trusted(sock: socket.socket) -> bool:
    """Return whether the other end belongs to the user of this process, or to root."""
    return peer_of(sock)[1] in (os.geteuid(), 0)
