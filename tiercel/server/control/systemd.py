"""Notifications to systemd (sd_notify(3)) of a service of type notify."""

import asyncio
import logging
import socket
from collections.abc import Callable

from tiercel.values.clock import Clock

log = logging.getLogger(__name__)


class SystemdNotifier:
    """Sends notifications about the state of the daemon. Without an address it sends nothing."""

    def __init__(self, address: str | None, clock: Clock) -> None:
        self._address = address
        self._clock = clock

    def ready(self, status: str) -> None:
        """Report that the start or a reload has ended. `systemctl status` shows `status`."""
        self._send("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """Report that a reload begins; `ready` reports its end."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={int(self._clock.now_s() * 1e6)}")

    def stopping(self, status: str, max_s: float) -> None:
        """Report that shutdown begins and may take `max_s`, whatever the unit file allows."""
        self._send("STOPPING=1", f"EXTEND_TIMEOUT_USEC={int(max_s * 1e6)}", f"STATUS={status}")

    async def watch(self, silence_s: float, is_healthy: Callable[[], bool]) -> None:
        """Notify the watchdog twice per `silence_s` while `is_healthy` returns True. Runs until it is cancelled."""
        was_healthy = True
        while True:
            is_healthy_now = is_healthy()
            if is_healthy_now:
                self._send("WATCHDOG=1")
            elif was_healthy:
                log.error("watchdog not notified because the engine is stalled silence_s=%.1f", silence_s)
            was_healthy = is_healthy_now
            await asyncio.sleep(silence_s / 2)

    def _send(self, *lines: str) -> None:
        if self._address is None:
            return
        address = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address  # @: abstract
        text = "\n".join(line.replace("\n", " ") for line in lines)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
                sock.sendto(text.encode(errors="backslashreplace"), address)
        except OSError as exc:
            log.warning("cannot notify the service manager address=%s error=%s", self._address, exc)
