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

from tiercel.server.http.admin_listener import AdminListener
from tiercel.server.http.failure import fault_response
from tiercel.settings.exposure import is_loopback
from tiercel.values.errors import AdmissionError

ANY_HOST = "*"

_HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.]{2,45})\]|(?P<name>[a-z0-9._-]{1,254}))(?::[0-9]{0,5})?", re.ASCII)


def accepted_hosts(names: Sequence[str], host: str | None) -> "HostNames | None":
    """Return the names that a listener answers to besides its addresses; None if it answers to every name.

    `names` are those of --allowed-hosts and `host` is the address of the listener, None for a Unix socket. Only a
    listener on loopback checks the header without --allowed-hosts: other addresses need a key, and no browser connects
    to a Unix socket.
    """
    if ANY_HOST in names or not (names or (host is not None and is_loopback(host))):
        return None
    return HostNames(names)


class HostNames:
    """Names of hosts. `*.example.com` stands for all names that end in `.example.com`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(name for name in names if not name.startswith("*"))
        self._suffixes = tuple(name.removeprefix("*") for name in names if name.startswith("*"))

    def __contains__(self, name: str) -> bool:
        return name in self._names or name.endswith(self._suffixes)


class HostCheck:
    """Refuses requests whose `Host` is missing, given twice or malformed (400), or names another server (421).

    Accepted are `localhost`, loopback addresses, the address at which the request arrived, and `public`, each with any
    port; None: everything. Requests that arrive at the admin `listener` are checked against `admin` instead. HTTP/1.0
    needs no `Host`: browsers do not use it.
    """

    def __init__(
        self,
        app: ASGIApp,
        public: HostNames | None,
        admin: HostNames | None = None,
        listener: AdminListener | None = None,
    ) -> None:
        self._app = app
        self._public = public
        self._admin = admin
        self._listener = listener

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await fault_response(refusal, scope)(scope, receive, send)

    def _refusal(self, scope: Scope) -> AdmissionError | None:
        names = self._admin if self._listener is not None and self._listener.has(scope) else self._public
        if names is None:
            return None
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
            is_ours = address.is_loopback or address == _address(_own_address(scope)) or str(address) in names
        else:
            name = name.removesuffix(".")
            is_ours = name == "localhost" or name in names
        return None if is_ours else _misdirected(text)


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
