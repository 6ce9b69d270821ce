"""The number of client connections that the limit on file descriptors allows."""

import resource

from tiercel.server.http.gate import RESERVED_CONNECTIONS
from tiercel.settings.settings import ServerSettings
from tiercel.values.errors import ConfigError

_OTHER_FILES = 64  # of the process: sockets to the engine, logs, files that are read for a moment
_MIN_CONNECTIONS = 16
_MAX_CONNECTIONS = 8192  # unless a setting asks for more


def max_connections(settings: ServerSettings, descriptors: int | None = None) -> int:
    """Return the maximum number of client connections.

    `descriptors` is the limit on file descriptors; default: the one of this process. Errors: ConfigError if the limit
    is too low.
    """
    if descriptors is None:
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if descriptors == resource.RLIM_INFINITY:
        return settings.max_connections or _MAX_CONNECTIONS
    kept = _OTHER_FILES + RESERVED_CONNECTIONS
    wanted = settings.max_connections or _MIN_CONNECTIONS
    if wanted > descriptors - kept:
        asked = (
            "" if settings.max_connections is None else f"--max-connections {settings.max_connections} is too many: "
        )
        raise ConfigError(
            "server.descriptors",
            f"{asked}the limit of {descriptors} file descriptors leaves {max(descriptors - kept, 0)} for client"
            f" connections; raise it (ulimit -n, or LimitNOFILE of systemd) to at least {wanted + kept}",
        )
    return settings.max_connections or min(descriptors - kept, _MAX_CONNECTIONS)
