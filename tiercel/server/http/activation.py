"""A listening socket that another process opened: systemd (socket activation), or the daemon that is taken over."""

import os
import socket
from collections.abc import Sequence

from msgspec.structs import replace

from tiercel.server.http.listen import bind
from tiercel.settings.config import take_listen_fds
from tiercel.settings.exposure import check_exposure
from tiercel.settings.settings import ServerSettings
from tiercel.values.errors import ConfigError

HTTP_NAME = "http"
"""The name of the socket for requests where systemd passes several (FileDescriptorName=)."""


def open_listener(settings: ServerSettings, sock: socket.socket | None = None) -> tuple[socket.socket, ServerSettings]:
    """Return the listening socket, and the settings with its address: `sock`, that of systemd, or one of our own.

    Errors: ConfigError, also if a foreign socket can be reached from other machines and no key is set.
    """
    sock = sock or activated_listener()
    if sock is None:
        return bind(settings), settings
    try:
        settings = settings_of_listener(settings, sock)
        check_exposure(settings)
    except ConfigError:
        sock.close()
        raise
    return sock, settings


def activated_listener() -> socket.socket | None:
    """Return the listening socket that systemd passed to this process; None if it passed none.

    Effects: see `take_listen_fds`; the descriptors are closed when a program is executed.
    Errors: ConfigError if it is not one listening stream socket.
    """
    passed = take_listen_fds()
    for fd, _ in passed:
        os.set_inheritable(fd, False)
    fd = _choose(passed)
    return None if fd is None else adopt_listener(fd, f"descriptor {fd} of LISTEN_FDS")


def _choose(passed: Sequence[tuple[int, str]]) -> int | None:
    """Return the descriptor of the socket for requests: the only one, or the one with its name."""
    fds = [fd for fd, name in passed if len(passed) == 1 or name == HTTP_NAME]
    if passed and len(fds) != 1:
        names = ", ".join(name for _, name in passed)
        raise ConfigError(
            "server.activation",
            f"LISTEN_FDS={len(passed)}: of several sockets one must be called {HTTP_NAME} "
            f"(FileDescriptorName={HTTP_NAME}); they are called {names}",
        )
    return fds[0] if fds else None


def adopt_listener(fd: int, origin: str) -> socket.socket:
    """Return a listening socket for a descriptor. Errors: ConfigError; the descriptor is closed then."""
    try:
        sock = socket.socket(fileno=fd)
    except OSError as exc:
        raise ConfigError("server.activation", f"{origin} is not a socket: {exc.strerror}") from exc
    is_stream = sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)
    if not is_stream or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.close()
        raise ConfigError("server.activation", f"{origin} is not a listening TCP or Unix stream socket")
    sock.setblocking(False)
    return sock


def settings_of_listener(settings: ServerSettings, sock: socket.socket) -> ServerSettings:
    """Return the settings with the address of the socket instead of --host and --port, or --uds."""
    if sock.family != socket.AF_UNIX:
        host, port = sock.getsockname()[:2]
        return replace(settings, host=host, port=port, uds=None)
    path: str | bytes = sock.getsockname()
    return replace(settings, uds=path if isinstance(path, str) else f"@{os.fsdecode(path[1:])}")
