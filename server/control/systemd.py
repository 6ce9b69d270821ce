"""What systemd hears of a service of type notify: datagrams as of sd_notify(3), to the socket that it names."""

import asyncio
import logging
import socket
from collections.abc import Callable

from tiercel.clock import Clock

log = logging.getLogger(__name__)


class SystemdNotifier:
    """Tells the service manager where the daemon is in its life. Without an address it says nothing."""

    def __init__(self, address: str | None, clock: Clock) -> None:
        self._address = address
        self._clock = clock

    def ready(self, status: str) -> None:
        """The start or a reload is over. `status` is the line of `systemctl status`."""
        self._tell("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """A reload begins; `ready` ends it."""
        self._tell("RELOADING=1", f"MONOTONIC_USEC={int(self._clock.now_s() * 1e6)}")

    def stopping(self, status: str, most_s: float) -> None:
        """The end begins, and may take so long whatever the unit file says."""
        self._tell("STOPPING=1", f"EXTEND_TIMEOUT_USEC={int(most_s * 1e6)}", f"STATUS={status}")

    async def watch(self, silence_s: float, is_well: Callable[[], bool]) -> None:
        """Say that all is well, twice in the time that the watchdog bears silence; say nothing while it is not."""
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
