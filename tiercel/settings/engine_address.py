"""Addresses of engines as an operator writes them."""

import re

from msgspec import Struct

from tiercel.system.server_url import host_fault
from tiercel.values.errors import ConfigError

DEFAULT_PORT = 8100
MAX_ENGINES = 64

_ADDRESS = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+)):(?P<port>\d{1,5})")
_NAME = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?::(?P<port>\d{1,5}))?")


class EngineAddress(Struct, frozen=True):
    """The address at which an engine listens, or, with `is_name`, a name with one address for each engine."""

    host: str
    port: int
    is_name: bool = False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_address(text: str, flag: str, least_port: int = 1) -> EngineAddress:
    """Read HOST:PORT or [IPV6]:PORT. Errors: ConfigError that names `flag`."""
    found = _ADDRESS.fullmatch(text)
    if found is None or not least_port <= int(found["port"]) <= 65_535:
        raise ConfigError("config.value", f"{flag} {text[:80]}: expected HOST:PORT with a port up to 65535")
    host = found["v6"] or found["name"]
    _check_host(host, f"{flag} {text[:80]}")
    return EngineAddress(host, int(found["port"]))


class EngineSource(Struct, frozen=True):
    """The addresses of a front's engines, or the path of a file that has them and may change."""

    addresses: tuple[EngineAddress, ...] = ()
    path: str | None = None
    """Path of the file; then there are no `addresses`."""


def read_engines(text: str) -> EngineSource:
    """Read the value of --engines. Errors: ConfigError."""
    kind, _, rest = text.partition(":")
    flag = f"--engines {text[:80]}"
    if kind == "file" and rest:
        return EngineSource(path=rest)
    if kind == "dns":
        found = _NAME.fullmatch(rest)
        if found is None or not 1 <= (port := int(found["port"] or DEFAULT_PORT)) <= 65_535:
            raise ConfigError("config.value", f"{flag}: expected dns:NAME or dns:NAME:PORT")
        _check_host(found["name"], flag)
        return EngineSource((EngineAddress(found["name"], port, is_name=True),))
    if kind != "static" or not rest:
        raise ConfigError("config.value", f"{flag}: expected static:HOST:PORT,... or dns:NAME[:PORT] or file:PATH")
    return EngineSource(_distinct([read_address(part.strip(), "--engines") for part in rest.split(",")], flag))


def read_engine_list(text: str, path: str) -> tuple[EngineAddress, ...]:
    """Read the file of `file:PATH`: an address a line; empty lines and lines that begin with # count for nothing.

    Errors: ConfigError that names `path`.
    """
    lines = [line.strip() for line in text.splitlines()]
    return _distinct([read_address(line, path) for line in lines if line and not line.startswith("#")], path)


def _check_host(host: str, where: str) -> None:
    if (fault := host_fault(host)) is not None:
        raise ConfigError("config.value", f"{where}: {fault}")


def _distinct(addresses: list[EngineAddress], where: str) -> tuple[EngineAddress, ...]:
    if len(set(addresses)) < len(addresses):
        raise ConfigError("config.value", f"{where}: the same address twice")
    if len(addresses) > MAX_ENGINES:
        raise ConfigError("config.value", f"{where}: {len(addresses)} engines, at most {MAX_ENGINES}")
    return tuple(addresses)
