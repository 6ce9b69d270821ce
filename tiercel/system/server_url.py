"""Read the URL of a server, and the name of a host, as a person writes them.

A text that can be no address is refused with the reason before anything is looked up: the codecs behind
`socket.getaddrinfo` and the HTTP client raise errors of many kinds for it, in words that help nobody.
"""

import ipaddress
import re
import unicodedata
from urllib.parse import urlsplit

from tiercel.values.errors import ConfigError

_MAX_PORT = 65_535
_MAX_HOST = 253  # characters of a name, in the form that is looked up (RFC 1035)
_LABEL = re.compile(r"[A-Za-z0-9_-]{1,63}", re.ASCII)
_FOUR_NUMBERS = re.compile(r"(?:\d+\.){3}\d+", re.ASCII)
_IN_NAMES = ("L", "M", "N")  # kinds of characters beyond ASCII that a name may have (RFC 5892): no symbols


def host_fault(host: str) -> str | None:
    """Return why a text can be neither a host name nor an IP address; None if it can be one."""
    if not host:
        return "the name of the host is missing"
    try:
        ipaddress.ip_address(host)
        return None
    except ValueError:
        labels = host.removesuffix(".").split(".")
    if _FOUR_NUMBERS.fullmatch(host):
        return f"{host[:80]} is no IPv4 address: each of its numbers is at most 255"
    encoded = [_encoded_label(label) for label in labels]
    for label, name in zip(labels, encoded, strict=True):
        if not label:
            return f"{host[:80]!r} is no host name: it has an empty part between its dots"
        if name is None:
            return f"{label[:80]!r} cannot be part of a host name: letters, digits and hyphens, at most 63"
    if sum(len(name) + 1 for name in encoded if name is not None) - 1 > _MAX_HOST:
        return f"the name of the host is longer than {_MAX_HOST} characters"
    return None


def read_server_url(text: str, flag: str) -> str:
    """Return the URL of a server, without slashes and /v1 at its end.

    Errors: ConfigError that names `flag`, if no server can ever be at this address.
    """
    fault = _fault(text)
    if fault is not None:
        shown = text if text.isprintable() else repr(text)
        raise ConfigError("config.url", f"{flag} {shown[:200]}: {fault}")
    return text.rstrip("/").removesuffix("/v1")


def _fault(text: str) -> str | None:
    if not text.lower().startswith(("http://", "https://")):
        return "an address begins with http:// or https://"
    if any(char.isspace() or not char.isprintable() for char in text):
        return "an address has no spaces and no control characters"
    try:
        parts = urlsplit(text)
        address, bracket, rest = parts.netloc.rpartition("@")[2].rpartition("]")
        before, _, port = rest.partition(":")
        if bracket and before:
            raise ValueError(address)
    except ValueError:
        return "an IPv6 address stands in brackets, as in http://[::1]:8000"
    if port and not (port.isascii() and port.isdigit() and 0 < int(port[:6]) <= _MAX_PORT):
        return f"{port[:20]!r} is no port: a port is a number up to {_MAX_PORT}"
    if "?" in text or "#" in text:
        return "the address of a server has no query and no fragment"
    return host_fault(parts.hostname or "")


def _encoded_label(label: str) -> str | None:
    """Return a part of a name as it is looked up; None if it cannot be one."""
    try:
        name = label if label.isascii() else label.encode("idna").decode("ascii")
        shown = name.encode("ascii").decode("idna") if name.lower().startswith("xn--") else label
    except UnicodeError:
        return None
    is_name = all(char.isascii() or unicodedata.category(char)[0] in _IN_NAMES for char in shown)
    return name if is_name and _LABEL.fullmatch(name) else None
