"""Who can reach a listener: nobody beyond this machine gets in without a key unless the operator says so."""

import ipaddress

from tiercel.errors import ConfigError
from tiercel.settings import ServerSettings


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on this address, or be a peer with it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(settings: ServerSettings) -> None:
    """Refuse to listen beyond this machine without a key. Errors: ConfigError."""
    is_private = settings.uds is not None or is_loopback(settings.host)
    has_keys = bool(settings.api_keys) or settings.tenants_config is not None  # a tenant without a key is refused
    if not is_private and not has_keys and not settings.allow_unauthenticated:
        raise ConfigError(
            "server.exposed",
            f"--host {settings.host or '*'} can be reached from other machines: "
            "give --api-key or --tenants-config, or --allow-unauthenticated if anybody may use it",
        )
