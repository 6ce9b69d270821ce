"""The old daemon's side of a takeover: it gives up the SSD tier, offers its sockets and, once confirmed, leaves."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Mapping

import structlog

from tiercel.server.client.status import EngineState, EngineStatus
from tiercel.server.control.address import control_path
from tiercel.server.control.listener import ControlConnection, ControlListener
from tiercel.server.control.messages import HTTP, ControlError, Leaving, Offer, Refused, Serving, TakeOver, decode
from tiercel.settings.settings import ServerSettings
from tiercel.values.errors import ConfigError


class Handover:
    """Carries out what is asked on the control socket: to drain, and to hand over to another daemon.

    The other daemon locks the SSD folders and loads its model while this one serves on without SSD tier. If the other
    one ends before it has confirmed that it accepts connections, this one goes on serving, still without SSD tier.
    """

    def __init__(
        self,
        status: EngineStatus,
        sock_by_name: Mapping[str, socket.socket],
        give_up_disk: Callable[[], Awaitable[bool]],
        drain: Callable[[], float],
        stop_accepting: Callable[[], None],
    ) -> None:
        """`give_up_disk` closes the volume and unlocks its folders; it returns False if that fails.

        `drain` begins the drain of a SIGTERM, unless one is under way, and returns its limit in seconds.
        """
        self._status = status
        self._sock_by_name = sock_by_name
        self._give_up_disk = give_up_disk
        self._drain = drain
        self._stop_accepting = stop_accepting
        self._listener: ControlListener | None = None
        self._is_busy = False
        self._log = structlog.stdlib.get_logger("server.handover")
        self.is_draining = False  # since a signal: this daemon ends without a successor
        self.confirmed = asyncio.Event()  # another daemon accepts the connections

    def listen(self, settings: ServerSettings) -> None:
        """Open the control socket. A daemon without one serves all the same, with a warning in the log."""
        try:
            path = control_path(settings, 0 if settings.uds is not None else self._sock_by_name[HTTP].getsockname()[1])
            if path is not None:
                listener = ControlListener(path, self)
                listener.open()
                self._listener = listener
        except (OSError, ConfigError) as exc:
            self._log.warning("no_control_socket", reason=exc.message if isinstance(exc, ConfigError) else str(exc))

    def close(self) -> None:
        """Close the control socket."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def drain(self) -> float:
        """Begin to drain."""
        return self._drain()

    async def hand_over(self, request: TakeOver, connection: ControlConnection) -> None:
        """Serve one takeover until it is confirmed or has failed."""
        if self._status.state is not EngineState.READY:
            connection.send(Refused("the engine of the running daemon is not ready; try again when it is"))
        elif self.is_draining:
            connection.send(Refused("the running daemon is draining; start without --takeover when it has exited"))
        elif self._is_busy or self.confirmed.is_set():
            connection.send(Refused("another daemon is taking over already"))
        else:
            self._is_busy = True
            try:
                await self._offer(request, connection)
            finally:
                self._is_busy = False

    async def _offer(self, request: TakeOver, connection: ControlConnection) -> None:
        if not await self._give_up_disk():
            self._log.error("takeover_refused", successor=request.pid, reason="the volume cannot be closed")
            connection.send(Refused("the running daemon cannot close its SSD volume: a call to the disk hangs"))
            return
        self._log.info("takeover_offered", successor=request.pid)
        names, socks = zip(*self._sock_by_name.items(), strict=True)
        connection.send(Offer(os.getpid(), names), tuple(sock.fileno() for sock in socks))
        try:
            decode(await connection.receive(), Serving)
        except ControlError as exc:
            self._log.error("takeover_failed", successor=request.pid, reason=str(exc), effect="no SSD tier")
            return
        self._stop_accepting()
        self.close()  # before the answer: the other daemon then opens its own
        self.confirmed.set()
        self._log.info("takeover_confirmed", successor=request.pid)
        connection.send(Leaving())
