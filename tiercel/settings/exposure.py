"""Check that a server reachable from other machines requires an API key."""

import ipaddress

from tiercel.settings.settings import ServerSettings
from tiercel.values.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def admin_host(settings: ServerSettings) -> str | None:
    """Return the address of the second listener; None if it is a Unix socket or if there is none."""
    return None if settings.admin_port is None else settings.admin_host or settings.host


def check_exposure(settings: ServerSettings) -> None:
    """Raise ConfigError if other machines can reach the server without a key and this is not allowed."""
    has_keys = bool(settings.api_keys) or settings.tenants_config is not None  # every tenant has a key
    for flag, host in {"--host": None if settings.uds else settings.host, "--admin-host": admin_host(settings)}.items():
        if host is not None and not is_loopback(host) and not has_keys and not settings.allow_unauthenticated:
            raise ConfigError(
                "server.exposed",
                f"{flag} {host or '*'} can be reached from other machines: "
                "give --api-key or --tenants-config, or --allow-unauthenticated to serve without a key",
            )
