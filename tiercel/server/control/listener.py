"""The control socket of a daemon: requests of processes of the same user on the same machine."""

import asyncio
import os
import socket
from pathlib import Path
from typing import Protocol

import structlog

from tiercel.server.control.address import is_trusted, peer_of
from tiercel.server.control.messages import (
    MAX_BYTES,
    VERSION,
    Answer,
    ControlError,
    Drain,
    Draining,
    Refused,
    TakeOver,
    decode_request,
    encode,
)

_REQUEST_S = 5.0  # to send the request after connecting
_MAX_CONNECTIONS = 8
_BACKLOG = 8


class ControlConnection:
    """One accepted connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    async def receive(self) -> bytes:
        """Return the next packet; empty if the peer has gone."""
        try:
            return await asyncio.get_running_loop().sock_recv(self._sock, MAX_BYTES)
        except OSError:
            return b""

    def send(self, answer: Answer, fds: tuple[int, ...] = ()) -> None:
        """Send an answer, with descriptors. A peer that has gone is found out by the next `receive`."""
        try:
            socket.send_fds(self._sock, [encode(answer)], fds)
        except OSError as exc:
            structlog.stdlib.get_logger("server.control").warning("control_answer_lost", error=exc.strerror)


class ControlHandler(Protocol):
    """Carries out requests."""

    def drain(self) -> float:
        """Begin to drain, unless a drain is under way. Return its limit in seconds."""
        ...

    async def hand_over(self, request: TakeOver, connection: ControlConnection) -> None:
        """Hand the sockets over to another daemon."""
        ...


class ControlListener:
    """Listens on a Unix socket of mode 0600, with one packet for each message."""

    def __init__(self, path: Path, handler: ControlHandler) -> None:
        self._path = path
        self._handler = handler
        self._sock: socket.socket | None = None
        self._inode = 0
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._log = structlog.stdlib.get_logger("server.control")

    def open(self) -> None:
        """Listen, in place of a socket that nobody answers. Runs on the event loop.

        Errors: OSError; FileExistsError if another daemon answers.
        """
        if is_answered(self._path):
            raise FileExistsError(f"another daemon listens on {self._path}")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            own.unlink(missing_ok=True)
            sock.bind(str(own))
            own.chmod(0o600)
            sock.listen(_BACKLOG)
            sock.setblocking(False)
            self._inode = own.stat().st_ino
            own.rename(self._path)
        except OSError:
            sock.close()
            own.unlink(missing_ok=True)
            raise
        self._sock = sock
        self._accepting = asyncio.get_running_loop().create_task(self._accept(sock))

    def close(self) -> None:
        """Accept no more requests, and remove the socket unless it belongs to another daemon by now."""
        if self._sock is None or self._accepting is None:
            return
        self._accepting.cancel()
        try:
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()
        except OSError:
            pass  # it is gone
        self._sock.close()
        self._sock = None

    async def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(sock)
            connection.setblocking(False)
            if len(self._connections) >= _MAX_CONNECTIONS:
                connection.close()
                continue
            task = loop.create_task(self._serve(connection))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, sock: socket.socket) -> None:
        with sock:
            pid, uid = peer_of(sock)
            connection = ControlConnection(sock)
            if not is_trusted(sock):
                self._log.warning("control_refused", pid=pid, uid=uid, reason="another user")
                connection.send(Refused("the daemon belongs to another user"))
                return
            try:
                async with asyncio.timeout(_REQUEST_S):
                    request = decode_request(await connection.receive())
            except (ControlError, TimeoutError) as exc:
                connection.send(Refused(f"the request cannot be read: {exc}"))
                return
            self._log.info("control_request", request=type(request).__name__, pid=pid)
            if request.version != VERSION:
                connection.send(Refused(f"the daemon speaks version {VERSION} of the protocol, not {request.version}"))
                return
            match request:
                case Drain():
                    connection.send(Draining(self._handler.drain()))
                    await connection.receive()
                case TakeOver():
                    await self._handler.hand_over(request, connection)


def is_answered(path: Path) -> bool:
    """Return whether a daemon listens on a control socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
