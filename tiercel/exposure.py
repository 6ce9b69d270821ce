"""Check that a server reachable from other machines requires an API key."""

import ipaddress

from tiercel.errors import ConfigError
from tiercel.settings import ServerSettings


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(settings: ServerSettings) -> None:
    """Raise ConfigError if other machines can reach the server without a key and this is not allowed."""
    is_private = settings.uds is not None or is_loopback(settings.host)
    has_keys = bool(settings.api_keys) or settings.tenants_config is not None  # every tenant has a key
    if not is_private and not has_keys and not settings.allow_unauthenticated:
        raise ConfigError(
            "server.exposed",
            f"--host {settings.host or '*'} can be reached from other machines: "
            "give --api-key or --tenants-config, or --allow-unauthenticated to serve without a key",
        )
