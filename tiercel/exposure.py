"""Who can reach a listener: nobody beyond this machine gets in without a key unless the operator says so."""

import ipaddress
from collections.abc import Sequence

from tiercel.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on this address, or be a peer with it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, uds: str | None, api_keys: Sequence[str], *, allow_unauthenticated: bool) -> None:
    """Refuse to listen beyond this machine without a key. Errors: ConfigError."""
    if uds is None and not api_keys and not allow_unauthenticated and not is_loopback(host):
        raise ConfigError(
            "server.exposed",
            f"--host {host or '*'} can be reached from other machines: "
            "give --api-key, or --allow-unauthenticated if anybody may use it",
        )
