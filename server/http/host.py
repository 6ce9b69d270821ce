"""The check of the `Host` header, against DNS rebinding.

A page on the web can make a browser resolve the name of its own site to 127.0.0.1 and so send requests to a server on
loopback that needs no key. The browser still sends the name in `Host`, so a server on loopback answers only to names
that it has. An address in `Host` is no such name: it reaches only the machine that it belongs to.
"""

import ipaddress
import re
from collections.abc import Sequence
from typing import cast

from starlette.types import ASGIApp, Receive, Scope, Send

from tiercel.errors import AdmissionError
from tiercel.exposure import is_loopback
from tiercel.server.http.failure import fault_response
from tiercel.settings import ServerSettings

ANY_HOST = "*"

_HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.]{2,45})\]|(?P<name>[a-z0-9._-]{1,254}))(?::[0-9]{0,5})?", re.ASCII)


def accepted_hosts(settings: ServerSettings) -> tuple[str, ...] | None:
    """Return the names that the server answers to besides its addresses; None if it answers to every name.

    Only a server on loopback checks the header without --allowed-hosts: other addresses need a key, and no browser
    connects to a Unix socket.
    """
    names = settings.allowed_hosts
    if ANY_HOST in names or not (names or (settings.uds is None and is_loopback(settings.host))):
        return None
    return names


class HostCheck:
    """Refuses requests whose `Host` is missing, given twice or malformed (400), or names another server (421).

    Accepted are `localhost`, loopback addresses, the address at which the request arrived, and `names`, each with any
    port. `*.example.com` in `names` stands for all names that end in `.example.com`. HTTP/1.0 needs no `Host`: browsers
    do not use it.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self._app = app
        self._names = frozenset(name for name in names if not name.startswith("*"))
        self._suffixes = tuple(name.removeprefix("*") for name in names if name.startswith("*"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await fault_response(refusal)(scope, receive, send)

    def _refusal(self, scope: Scope) -> AdmissionError | None:
        given = [value for name, value in cast(list[tuple[bytes, bytes]], scope["headers"]) if name == b"host"]
        if not given and scope["http_version"] == "1.0":
            return None
        if len(given) != 1:
            return _malformed("The Host header is missing." if not given else "The Host header is given twice.")
        text = given[0].decode("latin-1").lower()
        match = _HOST.fullmatch(text)
        if match is None:
            return _malformed("The Host header is not a host name or an address with an optional port.")
        name, address = match["name"], _address(match["address"] or match["name"])
        if address is None and name is None:
            return _malformed("The Host header has brackets around what is no IPv6 address.")
        if address is not None:
            is_ours = address.is_loopback or address == _address(_own_address(scope)) or str(address) in self._names
        else:
            is_ours = self._answers_to(name.removesuffix("."))
        return None if is_ours else _misdirected(text)

    def _answers_to(self, name: str) -> bool:
        return name == "localhost" or name in self._names or name.endswith(self._suffixes)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that a text is, with an IPv4 address inside IPv6 as IPv4; None if it is none."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _own_address(scope: Scope) -> str:
    """Return the address of this machine at which the request arrived; a path for a Unix socket."""
    server = cast(tuple[str, int | None] | None, scope.get("server"))
    return server[0] if server else ""


def _malformed(message: str) -> AdmissionError:
    return AdmissionError(400, message, code="invalid_host")


def _misdirected(text: str) -> AdmissionError:
    name = re.sub(r":[0-9]*$", "", text)[:100]
    return AdmissionError(
        421,
        f"This server does not answer to the host `{name}`. If clients reach it under this name, "
        f"start it with --allowed-hosts {name}.",
        code="host_not_allowed",
    )
