"""The engines of a front: where they are, and a link to each. Takes the place of the supervisor of an own engine."""

import asyncio
import secrets
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from tiercel.server.client.client import EngineClient
from tiercel.server.client.supervisor import DeathObserver
from tiercel.server.client.wire_access import front_tls, read_secret
from tiercel.server.links.fleet_client import FleetClient
from tiercel.server.links.link import EngineLink
from tiercel.settings.engine_address import MAX_ENGINES, EngineAddress, EngineSource, read_engine_list, read_engines
from tiercel.settings.exposure import is_loopback
from tiercel.settings.settings import EngineSettings, ServerSettings
from tiercel.values.clock import Clock
from tiercel.values.errors import ConfigError
from tiercel.values.limit_use import EXCHANGE_S
from tiercel.wire.handshake import IDENTITY_BYTES

HEARTBEAT_S = 5.0
"""The time without a byte from a host, which answers two pings a second, after which its engine counts as hung."""

_RESOLVE_S = 5.0  # between two look-ups of a name
_READ_S = 1.0  # between two readings of a file
_MAX_FILE_BYTES = 64 << 10


class RemoteEngines:
    """Keeps a link to each engine. A name is looked up and a file read again and again: the addresses may change."""

    def __init__(self, source: EngineSource, secret: bytes, tls: ssl.SSLContext | None) -> None:
        self._source = source
        self._refused = ""  # of the file, so that the log has each reason once
        self._stopped = asyncio.Event()
        self._tasks: dict[EngineLink, asyncio.Task[None]] = {}
        self._log = structlog.stdlib.get_logger("server.fleet")
        self.secret = secret
        self.tls = tls
        self.identity = secrets.token_bytes(IDENTITY_BYTES)
        self.read_heartbeat_s: Callable[[], float] = lambda: HEARTBEAT_S  # until the server sets it
        self.end = ""  # a front never ends by itself

    @staticmethod
    def of(settings: ServerSettings) -> "RemoteEngines":
        """Return the engines that the settings name. Errors: ConfigError."""
        assert settings.engines is not None
        return RemoteEngines(read_engines(settings.engines), read_secret(settings), front_tls(settings))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: the links end with the event loop."""

    @property
    def pid(self) -> int | None:
        """None: the engines are processes of their hosts."""
        return None

    @property
    def stall_limit_s(self) -> float:
        """0: hosts notice that their engines hang."""
        return 0.0

    @property
    def heartbeat_s(self) -> float:
        """The time without a byte from a host after which its engine counts as hung."""
        return self.read_heartbeat_s()

    async def run(self, client: EngineClient, settings: EngineSettings, clock: Clock, observer: DeathObserver) -> None:
        """Keep links to all engines until `stop`."""
        assert isinstance(client, FleetClient)
        client.deaths = observer
        telling = asyncio.create_task(self._tell_limits(client))
        try:
            while not self._stopped.is_set():
                await self._update(client, clock)
                if telling.done():  # it has failed, and asyncio logs the exception
                    telling = asyncio.create_task(self._tell_limits(client))
                try:
                    async with asyncio.timeout(_RESOLVE_S if self._source.path is None else _READ_S):
                        await self._stopped.wait()
                except TimeoutError:
                    continue
        finally:
            tasks = [telling, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def give_up_disk(self, client: EngineClient) -> bool:
        """Return True: a front has no SSD tier."""
        return True

    def stop(self) -> None:
        """End the links. The engines abort what this front has left there."""
        self._stopped.set()

    async def leave(self, patience_s: float) -> None:
        """Do nothing: the engines go on."""

    async def _tell_limits(self, client: FleetClient) -> None:
        """Tell the other fronts again and again what this front has allowed."""
        while True:
            client.tell_limits()
            await asyncio.sleep(EXCHANGE_S)

    async def _update(self, client: FleetClient, clock: Clock) -> None:
        """Open a link to each new address; forget addresses that are gone and have no connection."""
        wanted: dict[tuple[str, int], str] = {}  # to the name in the certificate
        addresses = self._source.addresses if self._source.path is None else self._read_file(self._source.path)
        if addresses is None:
            return  # the addresses of before stay
        for address in addresses:
            if address.is_name:
                found = await self._look_up(address)
                if found is None:
                    return  # the addresses of before stay
                wanted |= dict.fromkeys(found, address.host)
            else:
                wanted[address.host, address.port] = address.host
        known = {(link.host, link.port): link for link in self._tasks}
        for (host, port), name in wanted.items():
            if (host, port) not in known and len(self._tasks) < MAX_ENGINES:
                link = EngineLink(host, port, name, self, client, clock)
                client.add(link)
                self._tasks[link] = asyncio.create_task(link.run())
        for where, link in known.items():
            if where not in wanted and not link.is_connected:
                self._tasks.pop(link).cancel()
                client.remove(link)

    def _read_file(self, path: str) -> tuple[EngineAddress, ...] | None:
        """Return the addresses in a file, or None, with a line in the log, if they cannot be used."""
        try:
            with Path(path).open(encoding="utf-8") as file:
                text = file.read(_MAX_FILE_BYTES + 1)
            if len(text) > _MAX_FILE_BYTES:
                raise ConfigError("config.value", f"{path}: longer than {_MAX_FILE_BYTES} bytes")
            found = read_engine_list(text, path)
            far = [address for address in found if not is_loopback(address.host)]
            if far and self.tls is None:
                raise ConfigError("config.conflict", f"{path}: {far[0]} is on another machine: give --engine-certfile")
        except (ConfigError, OSError, UnicodeDecodeError) as error:
            reason = error.message if isinstance(error, ConfigError) else f"{path}: {error}"
            if reason != self._refused:
                self._log.warning("engine_list_refused", reason=reason)
            self._refused = reason
            return None
        self._refused = ""
        return found

    async def _look_up(self, address: EngineAddress) -> list[tuple[str, int]] | None:
        """Return the addresses of a name in a fixed order, or None if nobody knows."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except OSError as error:
            self._log.warning("name_not_found", name=address.host, error=error.strerror)
            return None
        return sorted({(str(where[0]), int(where[1])) for *_, where in found})
