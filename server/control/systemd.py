"""Notifications to systemd about a service of type notify: datagrams as in sd_notify(3)."""

import asyncio
import logging
import socket
from collections.abc import Callable

from tiercel.clock import Clock

log = logging.getLogger(__name__)


class SystemdNotifier:
    """The sender of notifications about the state of the daemon. Without an address it sends nothing."""

    def __init__(self, address: str | None, clock: Clock) -> None:
        self._address = address
        self._clock = clock

    def ready(self, status: str) -> None:
        """Report the end of the start or of a reload. `status` is the line of `systemctl status`."""
        self._tell("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """Report the start of a reload; `ready` reports its end."""
        self._tell("RELOADING=1", f"MONOTONIC_USEC={int(self._clock.now_s() * 1e6)}")

    def stopping(self, status: str, most_s: float) -> None:
        """Report the start of the shutdown, which may take `most_s` regardless of the unit file."""
        self._tell("STOPPING=1", f"EXTEND_TIMEOUT_USEC={int(most_s * 1e6)}", f"STATUS={status}")

    async def watch(self, silence_s: float, is_well: Callable[[], bool]) -> None:
        """Ping the watchdog twice per `silence_s` while the daemon is well. Runs until it is cancelled."""
        was_well = True
        while True:
            is_now = is_well()
            if is_now:
                self._tell("WATCHDOG=1")
            elif was_well:
                log.error("watchdog kept waiting silence_s=%.1f", silence_s)
            was_well = is_now
            await asyncio.sleep(silence_s / 2)

    def _tell(self, *lines: str) -> None:
        if self._address is None:
            return
        address = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address  # @: abstract
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
                sock.sendto("\n".join(line.replace("\n", " ") for line in lines).encode(), address)
        except OSError as exc:
            log.warning("service manager does not listen address=%s error=%s", self._address, exc)
