"""The socket that clients connect to."""

import contextlib
import errno
import os
import socket
import ssl
import stat
from collections.abc import Generator

from tiercel.settings.settings import ServerSettings
from tiercel.system.port_holder import ways_out
from tiercel.system.server_url import host_fault
from tiercel.values.errors import ConfigError

_BACKLOG = 2048


def check_tls(settings: ServerSettings) -> None:
    """Check the certificate at the start instead of in the first handshake. Errors: ConfigError."""
    if settings.ssl_certfile is None and settings.ssl_keyfile is None:
        return
    if settings.ssl_certfile is None:
        raise ConfigError("server.tls", "--ssl-keyfile needs --ssl-certfile")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except OSError as exc:  # includes ssl.SSLError
        named = f"{settings.ssl_certfile} and {settings.ssl_keyfile or settings.ssl_certfile}"
        raise ConfigError("server.tls", f"cannot use the certificate and key of {named}: {exc}") from exc


def bind(settings: ServerSettings) -> socket.socket:
    """Listen now, so that early connections queue while the engine loads. Errors: ConfigError."""
    return _bind(settings.uds, settings.host, settings.port, "")


def bind_admin(settings: ServerSettings, taken: socket.socket | None = None) -> socket.socket | None:
    """Listen for the operator, if a second listener is configured: on `taken` if it has that address.

    Errors: ConfigError.
    """
    if settings.admin_uds is None and settings.admin_port is None:
        return None
    if taken is not None:
        is_path, name = taken.family == socket.AF_UNIX, taken.getsockname()
        if name == settings.admin_uds or (not is_path and not settings.admin_uds and name[1] == settings.admin_port):
            return taken
    return _bind(settings.admin_uds, settings.admin_host or settings.host, settings.admin_port or 0, "admin-")


def _bind(path: str | None, host: str, port: int, prefix: str) -> socket.socket:
    """Listen. `prefix` of the flags that name the address. Errors: ConfigError."""
    where = path or f"{host}:{port}"
    if path is None and host and (fault := host_fault(host)) is not None:
        raise ConfigError("server.bind", f"--{prefix}host {host}: {fault}")
    try:
        if path is not None:
            return _bind_path(path)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # with protocol 0 asyncio would not set TCP_NODELAY, and Nagle's algorithm would delay answers by 40 ms
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        with _closed_on_error(sock):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
            sock.listen(_BACKLOG)
            sock.setblocking(False)
        return sock
    except OSError as exc:
        message = f"cannot listen on {where}: {exc.strerror or exc}"
        if exc.errno == errno.EADDRINUSE:
            way = ways_out(port, f"--{prefix}port") if path is None else f"choose another --{prefix}uds"
            message = f"{message}; {way}"
        raise ConfigError("server.bind", message) from exc


def _bind_path(path: str) -> socket.socket:
    """Listen on a Unix socket for this user and group; replace one that a dead server left behind."""
    if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode) and not _is_answered(path):
        os.unlink(path)
    sock = socket.socket(socket.AF_UNIX)
    with _closed_on_error(sock):
        sock.bind(path)
        os.chmod(path, 0o660)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    return sock


@contextlib.contextmanager
def _closed_on_error(sock: socket.socket) -> Generator[None]:
    try:
        yield
    except OSError:
        sock.close()
        raise


def _is_answered(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
        return True


def url_of(settings: ServerSettings, sock: socket.socket) -> str:
    """Return the URL of a listener for browsers and clients."""
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return f"unix:{name}" if isinstance(name, str) else f"unix:@{os.fsdecode(name[1:])}"
    scheme = "https" if settings.ssl_certfile else "http"
    host, port = name[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"{scheme}://{shown}:{port}{settings.root_path}"
