"""The new daemon's side of a takeover: it gets the sockets of the old one, and confirms once it accepts connections."""

import os
import socket
from types import TracebackType
from typing import Self

import structlog

from tiercel.server.control.address import control_path
from tiercel.server.control.caller import ControlCaller
from tiercel.server.control.messages import ADMIN, HTTP, ControlError
from tiercel.server.http.activation import adopt_listener
from tiercel.settings.settings import ServerSettings
from tiercel.values.errors import ConfigError


class Predecessor:
    """A running daemon that has given up its SSD tier and has offered its listening sockets."""

    def __init__(self, caller: ControlCaller, sock: socket.socket, admin_sock: socket.socket | None) -> None:
        self._caller = caller
        self.sock = sock  # for requests; the old daemon accepts on it, too, until `confirm`
        self.admin_sock = admin_sock  # for the operator, if the old daemon has a second one
        self._log = structlog.stdlib.get_logger("server.predecessor")

    @staticmethod
    def find(settings: ServerSettings) -> "Predecessor | None":
        """Ask the daemon on this port or Unix socket for its sockets; return None if there is none.

        Blocks until the old daemon has closed its volume. Errors: ConfigError if it refuses.
        """
        try:
            path = control_path(settings, settings.port)
            caller = None if path is None else ControlCaller.connect(path)
            if caller is None:
                return None
            try:
                names, fds = caller.take_over()
            except ControlError:
                caller.close()
                raise
        except ControlError as exc:
            raise ConfigError("server.takeover", f"--takeover: {exc.message or exc}") from exc
        fd_by_name = dict(zip(names, fds, strict=True))
        for name, fd in fd_by_name.items():
            if name not in (HTTP, ADMIN):
                os.close(fd)
        if HTTP not in fd_by_name:
            caller.close()
            raise ConfigError("server.takeover", f"--takeover: the running daemon (pid {caller.pid}) offers no socket")
        sock = adopt_listener(fd_by_name[HTTP], "the socket of the running daemon")
        admin = adopt_listener(fd_by_name[ADMIN], "its admin socket") if ADMIN in fd_by_name else None
        found = Predecessor(caller, sock, admin)
        found._log.info("takeover_begun", predecessor=caller.pid)
        return found

    def confirm(self) -> None:
        """Tell the old daemon that this one accepts connections. Blocks; one that has died needs no telling."""
        try:
            self._caller.confirm()
            self._log.info("takeover_done", predecessor=self._caller.pid)
        except ControlError as exc:
            self._log.warning("takeover_unconfirmed", predecessor=self._caller.pid, reason=exc.message or str(exc))
        self._caller.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._caller.close()
        self.sock.close()
        if self.admin_sock is not None:
            self.admin_sock.close()
